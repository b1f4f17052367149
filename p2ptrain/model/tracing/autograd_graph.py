"""Autograd while a model is traced: derivatives that it takes by itself, and the graph of its loss.

A trace follows the operations of `torch.autograd.grad` in forward() or the loss, but loses two
things. Without `create_graph` the derivative is a constant to what comes after, and nothing in the
graph says so. And what autograd keeps of the forward pass (the result of `tanh`, the transposed
weight inside `linear`) reaches the trace as a tensor that it has never seen. So a model that
differentiates is traced once more, with composite operators taken apart, and with autograd's copies
known for what they are copies of.

Autograd's own graph shows which inputs the loss reaches, what is kept for the backward, which
tensors share memory. `AnyLayout` stands for the strides of the gradients that a user's backward
gets: a trace has them contiguous, but in training they may be expanded from one number (as after a
sum) or transposed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, _ops, fx
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from p2ptrain.errors import CaptureError
from p2ptrain.model.tracing.trace_patches import replaced_in_this_thread

_modes: Any = _ops

_DETACH = torch.ops.aten.detach.default


class DifferentiatesError(Exception):
    """The model takes a derivative, which this trace is not prepared for."""


class _Derivatives(TorchFunctionMode):
    """Derivatives as constants where they are; none that end in `.grad`."""

    def __init__(self, *, traced: bool, expected: bool) -> None:
        super().__init__()
        self._traced, self._expected = traced, expected

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is Tensor.backward:
            _refuse_backward()
        if func is not torch.autograd.grad:
            return func(*args, **given)
        if self._traced and recorder() is None:
            raise CaptureError(
                "forward() or the loss takes a derivative inside torch.vmap or torch.autocast, "
                "where it cannot be followed. Call torch.autograd.grad outside of them"
            )
        if self._traced and not self._expected:
            raise DifferentiatesError
        if given.get("is_grads_batched", args[6] if len(args) > 6 else False):
            raise CaptureError(
                "forward() or the loss takes many derivatives at once (is_grads_batched, "
                "vectorize=True), which a trace cannot follow. Take them one by one: a Python loop "
                "over torch.autograd.grad, vectorize=False"
            )
        learns = bool(given.get("create_graph", args[4] if len(args) > 4 else False))
        with torch.set_grad_enabled(learns):  # it would compute so anyway: here it is recorded
            return func(*args, **given)


def _refuse_backward(*_: Any, **__: Any) -> None:
    raise CaptureError(
        "forward() or the loss calls backward(), which would add to gradients of its own. "
        "Use torch.autograd.grad(value, tensors)"
    )


def _refuse_forward_mode(*_: Any, **__: Any) -> None:
    raise CaptureError(
        "forward() or the loss takes a derivative in forward mode (make_dual), which a trace "
        "cannot follow. Use torch.autograd.grad or torch.autograd.functional.jvp, or write the "
        "derivative out"
    )


class _AutogradCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tell the trace of `recording` what autograd's copies of tensors are copies of.

    They are made by `detach`, beneath what is recorded, before the trace has seen the original. In
    a derivative they come from above it: there the call must not be recorded either.
    """

    def __init__(self, recording: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = recording.tracer.tensor_tracker
        self._originals: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _DETACH:
            return func(*args, **(kwargs or {}))
        with unrecorded():
            result = func(*args)
            original = self._originals.get(args[0], args[0])
            self._originals[result] = original
            if original in self._known and result not in self._known:
                self._known[result] = self._known[original]
        return result


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Calls in here are made, but no trace has them."""
    modes = [
        _modes._pop_mode_from_pre_dispatch()
        for _ in range(_modes._len_torch_dispatch_stack_pre_dispatch())
    ]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _modes._set_mode_pre_dispatch(mode)


def recorder() -> Any:
    """What records calls here; None where no trace is under way, or inside vmap and autocast."""
    return _modes.mode_stack_state_for_pre_dispatch().get(0)


@contextlib.contextmanager
def derivatives_as_traced(*, expected: bool) -> Iterator[None]:
    """For one call of forward() and the loss, traced or not.

    Args:
        expected: whether the trace is to be prepared for derivatives.

    Raises:
        DifferentiatesError: it is not, and there is one.
        CaptureError: it cannot be followed, or backward() is called.
    """
    with contextlib.ExitStack() as stack:
        recording = recorder()
        if expected and recording is not None:
            stack.enter_context(_AutogradCopies(recording))
            stack.callback(setattr, recording, "pre_dispatch", recording.pre_dispatch)
            recording.pre_dispatch = False  # composite operators are taken apart
        stack.enter_context(_Derivatives(traced=recording is not None, expected=expected))
        stack.enter_context(replaced_in_this_thread(torch.autograd, "backward", _refuse_backward))
        stack.enter_context(replaced_in_this_thread(forward_ad, "make_dual", _refuse_forward_mode))
        yield


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
