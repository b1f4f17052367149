"""Running statistics of a stage that several devices hold, added up as one device would.

A batch normalisation in training updates b <- (1 - m) b + m t, with t from its micro-batch alone.
After M micro-batches one device has

    b_M = (1 - m)^M b_0  +  sum over j of (1 - m)^(M-1-j) m t_j

so each device of a group runs its forwards from zero, which leaves m t_j in the buffer, and adds
them up with the right powers; the group's all-reduce (`runtime/allreduce.py`) is the second
term. Devices that take whole micro-batches so end with what one device would have, up to rounding.
Where samples are divided, a term is the parts' mean by samples: the mean is exact, while the
variance lacks that between the parts' means. An instance normalisation's term is a mean over
samples of each one's own statistics: both are exact.

Counters (`num_batches_tracked`) rise by a constant with every micro-batch on any device. Anything
else that a training graph writes to its state depends on which device computed what, so a stage
with such a unit has one device (`shareable`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from p2ptrain.errors import InternalError, PlanError
from p2ptrain.model.graph.description import ModelDescription, TensorKind
from p2ptrain.model.graph.effects import mutated_references
from p2ptrain.model.graph.nodes import Argument, GraphNode, NodeRef, Reference, StateRef
from p2ptrain.model.graph.operators import resolve
from p2ptrain.model.stage.mutated_state import names_written, state_views

_COUNTERS = ("aten.add_.Tensor", "aten.add_.Scalar")


class NotShareable(PlanError):
    """A training graph writes to its state in a way that several devices cannot add up."""


@dataclass(frozen=True, slots=True)
class BufferUpdate:
    """What one micro-batch does to a buffer: b <- kept · b + its own term.

    Attributes:
        kept: (1 - momentum) to the power of its uses; 1.0 of a counter.
        added: what a counter rises by; None where the term comes from the samples.
    """

    kept: float
    added: int | float | None


def shareable(description: ModelDescription, first: int, end: int) -> str | None:
    """Why units [first, end) must not be held by several devices; None where they may be."""
    try:
        written_buffers(description, first, end)
    except NotShareable as reason:
        return str(reason)
    return None


def written_buffers(description: ModelDescription, first: int, end: int) -> dict[str, BufferUpdate]:
    """What training writes in units [first, end), by canonical name.

    Raises:
        NotShareable: a parameter is written, or a buffer otherwise than by a normalisation's
            momentum or a counter's `add_`, or a buffer that is written is read.
    """
    written: dict[str, BufferUpdate] = {}
    for index, name, new in _writes(description, first, end):
        if new is None or description.tensors_by_name[name].kind is TensorKind.PARAMETER:
            unit = next(u for u in description.units[first:end] if index < u.train[1])
            raise NotShareable(
                f"training changes {name} in layer {unit.name} in a way that devices cannot add up"
            )
        written[name] = _both(name, written.get(name), new)
    return written


def _both(name: str, old: BufferUpdate | None, new: BufferUpdate) -> BufferUpdate:
    """One update of a buffer after another in the same micro-batch."""
    if old is None:
        return new
    if old.added is None and new.added is None:
        return BufferUpdate(old.kept * new.kept, None)
    if old.added is None or new.added is None:
        raise NotShareable(f"{name} is both a counter and a running statistic")
    return BufferUpdate(1.0, old.added + new.added)


def _writes(
    description: ModelDescription, first: int, end: int
) -> Iterator[tuple[int, str, BufferUpdate | None]]:
    """(node, tensor that some node here writes, what this node does to it); None = anything else.

    A node that only reads such a tensor does something else too: it would see what another
    device's forwards have not written.
    """
    start, stop = description.node_range(first, end, "train")
    nodes = description.train.nodes
    views = state_views(nodes, start, stop)
    changed = names_written(nodes[start:stop], views)
    whole: dict[Reference, str] = {StateRef(name): name for name in changed}
    for index in range(start, stop):
        others = list(nodes[index].references())
        for reference, update in _updates(nodes[index]):
            if reference in whole:
                others.remove(reference)
                yield index, whole[reference], update
                if update.added is not None:
                    whole[NodeRef(index)] = whole[reference]  # add_ returns what it has written
        for reference in others:
            for name in sorted(changed & views.get(reference, frozenset())):
                yield index, name, None


def _updates(node: GraphNode) -> Iterator[tuple[Reference, BufferUpdate]]:
    """What the node writes in a way that adds up."""
    operator = resolve(node.operator)
    arguments: dict[str, Argument] = dict(zip(operator.schema_arguments, node.args, strict=False))
    arguments |= dict(node.kwargs)
    written = mutated_references(node)
    if node.operator in _COUNTERS:
        target, rise = arguments["self"], arguments["other"]
        if isinstance(rise, int | float) and target in written and "alpha" not in arguments:
            yield written[0], BufferUpdate(1.0, rise)
    momentum = arguments.get("momentum")
    if "running_mean" in arguments and isinstance(momentum, int | float):
        yield from ((reference, BufferUpdate(1.0 - momentum, None)) for reference in written)


class RunningStatistics:
    """The written buffers of one stage during one round.

    Used by the compute thread between `begin` and the end of the last forward, by the event loop
    afterwards.

    Attributes:
        scratch: what the training graph writes to instead of the buffers, by name; the stage's own
            buffers change in `merge` only.
        sums: this device's terms of the round.
        totals: what the group's all-reduce makes of them, where the buffers are updated; the same
            tensors, but where that is elsewhere.
    """

    def __init__(
        self,
        written: Mapping[str, BufferUpdate],
        state: Mapping[str, Tensor],
        at_home: Mapping[str, Tensor],
    ) -> None:
        """`state` is where forwards run, `at_home` where it is updated."""
        self._written = dict(written)
        self._buffers = {name: at_home[name] for name in written}
        self.scratch = {name: torch.zeros_like(state[name]) for name in written}
        terms = [name for name, how in written.items() if how.added is None]
        self.sums = {name: torch.zeros_like(state[name]) for name in terms}
        self.totals = self.sums
        if at_home is not state:
            self.totals = {name: torch.zeros_like(at_home[name]) for name in terms}
        self._micro_batches = 0

    def begin(self, micro_batches: int) -> None:
        """A round of so many micro-batches, of the whole group, starts."""
        self._micro_batches = micro_batches
        for total in self.sums.values():
            total.zero_()

    def before_forward(self) -> None:
        """Let the forward start from zero.

        Behind autograd's back, as the normalisation's own write is: earlier micro-batches have
        saved these tensors for their backwards, which do not read them.
        """
        for tensor in self.scratch.values():
            tensor.data.zero_()

    def after_forward(self, micro_batch: int, share: float) -> None:
        """Add what the forward left.

        Args:
            micro_batch: its number in the round.
            share: part of its samples that this device took.
        """
        later = self._micro_batches - 1 - micro_batch
        if later < 0:
            raise InternalError(f"micro-batch {micro_batch} of {self._micro_batches}")
        for name, total in self.sums.items():
            total.add_(self.scratch[name], alpha=share * self._written[name].kept ** later)

    def merge(self) -> None:
        """Change the buffers as the round's micro-batches would have; `totals` are there."""
        for name, buffer in self._buffers.items():
            how = self._written[name]
            if how.added is not None:
                buffer.add_(self._micro_batches * how.added)
            else:
                buffer.mul_(how.kept**self._micro_batches).add_(self.totals[name])
