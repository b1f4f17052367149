"""What autograd's own graph of a loss shows while the model is traced.

Which inputs the loss reaches, what the graph keeps for the backward, which tensors share memory.
`AnyLayout` stands for the strides of the gradients that a user's backward gets: a trace has them
contiguous, but in training they may be expanded from one number (as after a sum) or transposed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from p2ptrain.errors import CaptureError
from p2ptrain.model.tracing.derivatives import recorder, unrecorded

_tls: Any = torch._C

Edge: TypeAlias = tuple[Any, int]
"""Where a gradient arrives: a node of autograd's, or None; the number of its output."""


def edge_of(value: Tensor) -> Edge:
    """Where the gradient of `value` arrives."""
    with _tls.DisableTorchFunction():  # what is in force during a trace would wrap the node
        return value.grad_fn, value.output_nr


def edges_reached(loss: Tensor) -> set[Edge]:
    """Where gradients of `loss` arrive; an own backward says in `gives` what it gives any to."""
    edges = [edge_of(loss)]
    reached: set[Edge] = set()
    passed: set[Any] = set()
    while edges:
        node, number = edges.pop()
        if node is None:
            continue
        reached.add((node, number))
        if node not in passed:
            passed.add(node)
            gives = getattr(node, "gives", None) or [True] * len(node.next_functions)
            edges += [e for e, given in zip(node.next_functions, gives, strict=True) if given]
    return reached


def kept_memory(loss: Tensor) -> frozenset[int]:
    """The memory of all tensors that the nodes on the way of gradients have saved."""
    with unrecorded(), _tls.DisableTorchFunction():
        return frozenset(
            storage_of(leaf)
            for node in {node for node, _ in edges_reached(loss)}
            for leaf in pytree.tree_leaves(_saved(node))
            if isinstance(leaf, Tensor)
        )


def _saved(node: Any) -> list[Any]:
    """What a node says that it has saved; of a function of the user's all that its context has."""
    names = [name for name in dir(node) if name.startswith("_saved_")]
    own = getattr(node, "own", None)
    return [*(getattr(node, name) for name in names), *([] if own is None else vars(own).values())]


_ASK = frozenset({Tensor.is_contiguous, Tensor.stride})

_HANG_ON_IT = frozenset(
    {
        *(Tensor.contiguous, Tensor.reshape, Tensor.reshape_as, Tensor.flatten, Tensor.ravel),
        *(torch.reshape, torch.flatten, torch.ravel),
    }
)


class AnyLayout(TorchFunctionMode):
    """Nothing is to be decided on it: not in Python, and operators that do are recorded whole.

    They would be taken apart, to nothing or to a mere view, in a model that differentiates, and
    `contiguous` in others too.
    """

    def __init__(self, function: str, arriving: Sequence[Tensor]) -> None:
        """`function`: the name of the user's, which is given `arriving`."""
        super().__init__()
        self._function = function
        self._memory = {storage_of(gradient) for gradient in arriving}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in _ASK and storage_of(args[0]) in self._memory and not _is_torch(sys._getframe(1)):
            raise CaptureError(
                f"{self._function}.backward decides on how a gradient lies in memory, which hangs "
                "on what comes after it. Call gradient.contiguous() in any case: where there is "
                "nothing to do it does nothing"
            )
        recording = recorder() if func in _HANG_ON_IT else None
        if recording is None:
            return func(*args, **given)
        before, recording.pre_dispatch = recording.pre_dispatch, True
        called = _contiguous if func is Tensor.contiguous else func
        try:
            return called(*args, **given)
        finally:
            recording.pre_dispatch = before


def _contiguous(tensor: Tensor, memory_format: Any = torch.contiguous_format) -> Any:
    """`tensor.contiguous()`, which does not get as far as an operator where nothing is to do.

    Of a view: the operator returns its argument then, which the trace would take for the result.
    """
    view = tensor.view_as(tensor)
    return torch.ops.aten.contiguous.default(view, memory_format=memory_format)


def _is_torch(caller: Any) -> bool:
    """torch asks for its own purposes."""
    return str(caller.f_globals.get("__name__", "")).startswith("torch.")


def storage_of(tensor: Tensor) -> int:
    """The same for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


def written_storages(graphs: Iterable[fx.Graph]) -> frozenset[int]:
    """The memory of all tensors that in-place operators of `graphs` write to."""
    found: set[int] = set()
    for node in (node for graph in graphs for node in graph.nodes):
        arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
        for argument, value in zip(arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found.update(storages(getattr(value, "meta", {}).get("val")))
    return frozenset(found)


def storages(value: Any) -> set[int]:
    """The memory of the tensors in a traced value."""
    return {storage_of(tensor) for tensor in tensors_in(value)}


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a traced value."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
