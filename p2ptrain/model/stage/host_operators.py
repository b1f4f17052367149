"""Operators of a stage on an accelerator that its host computes.

    card   x --+                +--> y     gx <--+               +-- gy
    host       +--> operator ---+                +-- backward <--+

Those that draw random numbers (`random_operators`), and those that the accelerator has been found
to compute wrong (`ComputeDevice.wrong`). The card waits for each. To its autograd each is one node
of the card's: of nodes on the host, another thread would run the backward, and sums of gradients
would be made in the order in which both threads come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from p2ptrain.devices.interface import ComputeDevice, operator_name
from p2ptrain.devices.processor import HOST
from p2ptrain.model.graph.effects import mutated_references
from p2ptrain.model.graph.nodes import GraphNode
from p2ptrain.model.graph.operators import resolve


def where_right(
    node: GraphNode, device: ComputeDevice, call: Callable[..., Any]
) -> Callable[..., Any]:
    """`call`, which computes a node, on the host where the device computes it wrong."""
    half_alone = device.wrong.get(operator_name(node.operator))
    if half_alone is None:
        return call
    on_host = OnHost(device, call, node)
    if not half_alone:
        return on_host

    def chosen(*args: Any, **kwargs: Any) -> Any:
        values = pytree.tree_leaves((args, kwargs))
        in_half = any(isinstance(v, Tensor) and v.dtype is torch.bfloat16 for v in values)
        return (on_host if in_half else call)(*args, **kwargs)

    return chosen


class OnHost:
    """An operator computed on the host, with arguments from the accelerator."""

    def __init__(self, device: ComputeDevice, call: Callable[..., Any], node: GraphNode) -> None:
        self._device, self._call = device, call
        operator = resolve(node.operator)
        written = operator.mutates if mutated_references(node) else frozenset[int]()
        self._written = {*written, *(operator.schema_arguments[position] for position in written)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the operator."""
        values, form = pytree.tree_flatten((args, kwargs))
        tensors = [value for value in values if isinstance(value, Tensor)]
        names = [  # of the argument that each is in: one tensor may be several arguments
            name
            for name, value in (*enumerate(args), *kwargs.items())
            for leaf in pytree.tree_leaves(value)
            if isinstance(leaf, Tensor)
        ]
        run = _HostCall(
            *(self._device, self._call, values, form, torch.is_grad_enabled()),
            [number for number, name in enumerate(names) if name in self._written],
        )
        inside = iter(_OneNode.apply(run, *tensors))  # type: ignore[no-untyped-call]
        for number in run.written:
            tensors[number].copy_(next(inside))
        results = [next(inside) if isinstance(r, Tensor) else r for r in run.results]
        results = [tensors[r.number] if isinstance(r, _Written) else r for r in results]
        return pytree.tree_unflatten(results, run.result_form)


@dataclass(frozen=True, slots=True)
class _Written:
    """A result that is the argument of that number, among the tensors."""

    number: int


@dataclass
class _HostCall:
    """One call.

    Attributes:
        values, form: its arguments.
        records: whether autograd does.
        written: numbers of the tensors among them that it writes to.
        results, result_form: what it gives, in host memory.
    """

    device: ComputeDevice
    call: Callable[..., Any]
    values: Sequence[Any]
    form: pytree.TreeSpec
    records: bool
    written: Sequence[int]
    results: list[Any] = field(init=False)
    result_form: pytree.TreeSpec = field(init=False)

    def compute(self, given: Sequence[Tensor]) -> list[Tensor]:
        """What it has written to, and what else it gives.

        Args:
            given: its tensors in host memory.
        """
        tensors = iter(given)
        args, kwargs = pytree.tree_unflatten(
            [self._here(v, tensors) for v in self.values], self.form
        )
        found, self.result_form = pytree.tree_flatten(self.call(*args, **kwargs))
        changed = {id(given[number]): number for number in self.written}
        self.results = [_Written(changed[id(r)]) if id(r) in changed else r for r in found]
        made = [result for result in self.results if isinstance(result, Tensor)]
        return [*(given[number] for number in self.written), *made]

    @staticmethod
    def _here(value: Any, tensors: Any) -> Any:
        if isinstance(value, Tensor):
            return next(tensors)
        return HOST.place if isinstance(value, torch.device) else value


class _OneNode(torch.autograd.Function):
    """See the module."""

    @staticmethod
    def forward(ctx: Any, run: _HostCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        copies = [copy.detach() for copy in run.device.fetched(tensors) if copy is not None]
        leaves = [c.requires_grad_(t.requires_grad) for c, t in zip(copies, tensors, strict=True)]
        with torch.set_grad_enabled(run.records):
            given = [leaf.clone() if k in run.written else leaf for k, leaf in enumerate(leaves)]
            found = run.compute(given)
        ctx.device, ctx.leaves, ctx.found = run.device, leaves, found
        inside = tuple(run.device.copy_in(tensor.detach()) for tensor in found)
        pairs = zip(inside, found, strict=True)
        ctx.mark_non_differentiable(*(there for there, here in pairs if not here.requires_grad))
        ctx.set_materialize_grads(False)
        return inside

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        leaves, found = ctx.leaves, ctx.found
        ctx.leaves = ctx.found = None  # as autograd frees what it has kept
        here = ctx.device.fetched(gradients)
        pairs = [(r, g) for r, g in zip(found, here, strict=True) if g is not None]
        wanted = ctx.needs_input_grad[1:]
        taking = [leaf for leaf, needed in zip(leaves, wanted, strict=True) if needed]
        if not pairs or not taking:
            return (None,) * (1 + len(leaves))
        roots, starts = zip(*pairs, strict=True)
        made = iter(torch.autograd.grad(roots, taking, starts, allow_unused=True))
        inside = [next(made) if needed else None for needed in wanted]
        return (None, *ctx.device.copied_in(inside))
