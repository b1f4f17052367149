"""What the devices of a stage sum after a round, packed into buckets and unpacked from them.

Gradients in the order in which a backward finishes them; before them the running statistics, which
are complete when the backwards of the last micro-batches begin. With an overlapped update, the sums
that the wire reaches after the backward go in the order in which a forward needs them, the first
units' first (P3, Jayarajan et al., MLSys 2019):

    units of a backward      5  4  3  2  1  0
    sums, turning at unit 3  5  4  3 .......... 0  1  2
    units of a forward                          0  1  2  3  4  5

Everything here costs about the time of copying a bucket, so that the event loop can do it while the
compute thread works.

A gradient that is whole in its bucket stays there, and updates read it. Nothing writes to it,
because parts of it may still be on their way to others. Where it is clipped, the update waits until
all devices have all sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from p2ptrain.devices.processor import HOST
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.nodes import StateRef
from p2ptrain.model.stage.finite import Broken
from p2ptrain.model.stage.stage import Stage
from p2ptrain.model.wire.tensor_codec import HostBuffer
from p2ptrain.model.wire.tensor_layout import WireFormat
from p2ptrain.plan.types.gradient_sums import USUAL
from p2ptrain.runtime.allreduce_buckets import (
    BucketSize,
    BucketSlice,
    GradientBucket,
    ReducedTensor,
    buckets_of,
)
from p2ptrain.runtime.not_finite import broken_update


class ReducedTensors:
    """The tensors of one stage that its group sums.

    Attributes:
        buckets: in the order in which they start.
        units: of each parameter, the first one that uses it.
        statistics: of the stage, to begin each round; None where it has one device.
        statistics_names: of the sums that are theirs.
        norm: of the round's sums of gradients so far; NaN where one was not finite.
        leaves_out: updates that are not finite: nothing is raised.
        skips: those whose gradients are not: of gradients nothing is raised.
    """

    def __init__(
        self,
        stage: Stage,
        size_bytes: BucketSize = USUAL.next_bytes,
        wire: WireFormat = WireFormat.EXACT,
        turn: int | None = None,
        turned_bytes: BucketSize = USUAL.turned_bytes,
        *,
        parameters: Mapping[str, Tensor] | None = None,
        sums: Mapping[str, Tensor] | None = None,
        buffer: HostBuffer = HOST.host_buffer,
    ) -> None:
        """The sums of a stage that was built with `shared=True`.

        Args:
            wire: of the job.
            size_bytes: of buckets.
            turn: gradients of the units before it come last, in the order of the units.
            turned_bytes: of the buckets of those.
            parameters, sums: with the gradients, and of the running statistics, where they are not
                the stage's own tensors.
            buffer: gives the memory of buckets.
        """
        self._description, self._units = stage.description, (stage.first, stage.end)
        parameters = parameters or stage.parameters()
        self.units = first_units(stage.description, stage.first, stage.end)
        names = gradient_order(stage.description, stage.first, stage.end)
        self._parameters = {name: parameters[name] for name in names}
        self._layouts = {n: torch.empty_like(p).stride() for n, p in self._parameters.items()}
        self.statistics = stage.statistics
        own = stage.statistics.sums if stage.statistics is not None else {}
        self._sums = own if sums is None else sums
        tensors: Mapping[str, Tensor] = {**self._sums, **self._parameters}
        self.statistics_names = frozenset(self._sums)
        last = [name for name in names if turn is not None and self.units[name] < turn]
        rest = [name for name in names if name not in set(last)]
        last.sort(key=self.units.__getitem__)
        exact = wire is WireFormat.EXACT
        first = [[*self._sums, *rest]] if exact else [[*self._sums], rest]
        self.buckets: tuple[GradientBucket, ...] = ()
        for names, size in [*((run, size_bytes) for run in first), (last, turned_bytes)]:
            summands = (
                ReducedTensor(name, tensors[name].dtype, tensors[name].numel()) for name in names
            )
            self.buckets += buckets_of(summands, size, first=len(self.buckets))
        unit = {name: number for name, number in self.units.items() if turn is not None}
        self._ranks = [min(unit.get(name, stage.end) for name in b.names) for b in self.buckets]
        self._wires = [
            WireFormat.EXACT if bucket.names & self.statistics_names else wire
            for bucket in self.buckets
        ]
        self._buffer = buffer
        self.norm = 0.0
        self.leaves_out = self.skips = False
        self._given: set[str] = set()  # whose gradient of this round comes from other devices only

    @cached_property
    def buckets_of_names(self) -> Mapping[str, frozenset[int]]:
        """Parameter -> numbers of the buckets that have a part of it."""
        found: dict[str, set[int]] = {name: set() for name in self._parameters}
        for bucket in self.buckets:
            for name in bucket.names & found.keys():
                found[name].add(bucket.index)
        return {name: frozenset(numbers) for name, numbers in found.items()}

    @cached_property
    def buckets_of_units(self) -> Mapping[int, frozenset[int]]:
        """Unit -> numbers of the buckets of all parameters that it is the first to use."""
        found: dict[int, frozenset[int]] = {}
        for name, numbers in self.buckets_of_names.items():
            unit = self.units[name]
            found[unit] = found.get(unit, frozenset()) | numbers
        return found

    def rank(self, index: int) -> int:
        """Of that bucket: chunks of the lowest go first."""
        return self._ranks[index]

    def wire(self, bucket: GradientBucket) -> WireFormat:
        """How a bucket's chunks travel: running statistics exactly, in buckets of their own."""
        return self._wires[bucket.index]

    def pack(self, bucket: GradientBucket, step: int) -> tuple[Tensor, int]:
        """A bucket's elements, 1-D in new memory, and a bit for each entry that has a value.

        Args:
            bucket: whose tensors are final.
            step: number of the update, from 1, for the error.

        Raises:
            MicroBatchNotFinite: some value is NaN or infinite, and no update is left out for that.
        """
        flat = self._buffer(bucket.elements, bucket.dtype)
        present = 0
        for bit, entry in enumerate(bucket.entries):
            value = self._own_value(entry)
            if value is None:
                _part(flat, entry).zero_()
            else:
                _part(flat, entry).copy_(value[entry.first : entry.end])
                present |= 1 << bit
        # Any NaN or infinity makes the sum one; a sum of finite values may overflow.
        if not flat.sum().isfinite():
            self._check_entries(bucket, flat, step)
        return flat, present

    def begin(self) -> None:
        """A round begins."""
        self.norm = 0.0

    def unpack(self, bucket: GradientBucket, flat: Tensor, present: int, step: int) -> None:
        """Put a bucket's sums in place; entries without a bit have no gradient on any device.

        Raises:
            MicroBatchNotFinite: as `pack`: finite values may have a sum that is not.
        """
        is_whole = not (flat.is_floating_point() or flat.is_complex())
        norm = 0.0 if is_whole else torch.linalg.vector_norm(flat).item()
        if not math.isfinite(norm):
            self._check_entries(bucket, flat, step)
            norm = flat.abs().max().item()
        self.norm = math.hypot(self.norm, norm)
        for bit, entry in enumerate(bucket.entries):
            if present >> bit & 1:
                self._put(entry, _part(flat, entry))

    def _put(self, entry: BucketSlice, total: Tensor) -> None:
        parameter = self._parameters.get(entry.name)
        if parameter is not None and total.numel() == parameter.numel():
            parameter.grad = total.as_strided(parameter.shape, self._layouts[entry.name])
            return
        value = self._value(entry.name)
        if value is None:
            value = _as_it_lies(self._new_gradient(entry.name))
            self._given.add(entry.name)
        value[entry.first : entry.end].copy_(total)

    def _check_entries(self, bucket: GradientBucket, flat: Tensor, step: int) -> None:
        for entry in () if self.leaves_out else bucket.entries:
            what = "buffer" if entry.name in self.statistics_names else "gradient"
            if self.skips and what == "gradient":
                continue
            if not _part(flat, entry).isfinite().all():
                broken = Broken(what, entry.name)
                raise broken_update(broken, step, self._description, *self._units)

    def _own_value(self, entry: BucketSlice) -> Tensor | None:
        """As `_value`, but nothing where a sum that is complete has only made room for the rest."""
        if not entry.first:
            self._given.discard(entry.name)  # of the round before
        return None if entry.name in self._given else self._value(entry.name)

    def _value(self, name: str) -> Tensor | None:
        """The elements of a tensor as they lie in memory, 1-D; None where there is no gradient."""
        if name in self._sums:
            return self._sums[name].view(-1)
        gradient: Tensor | None = self._parameters[name].grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided or gradient.stride() != self._layouts[name]:
            given, gradient = gradient.to_dense(), self._new_gradient(name)
            gradient.copy_(given)
        return _as_it_lies(gradient)

    def _new_gradient(self, name: str) -> Tensor:
        """Give a parameter a gradient, uninitialised, laid out alike on all devices."""
        parameter = self._parameters[name]
        parameter.grad = gradient = torch.empty_like(parameter, requires_grad=False)
        return gradient


def gradient_order(description: ModelDescription, first: int, end: int) -> list[str]:
    """Trainable parameters of units [first, end) as a backward finishes them.

    A gradient is final when the backward has come past the parameter's first use.
    """
    first_use = _first_use(description, first, end)
    names = description.trainable_names(first, end)
    return sorted(names, key=lambda name: -first_use.get(name, -1))


def first_units(description: ModelDescription, first: int, end: int) -> dict[str, int]:
    """The first of units [first, end) that uses each trainable parameter; `end` where none does."""
    uses = _first_use(description, first, end)
    names = description.trainable_names(first, end)
    units = dict.fromkeys(names, end)
    for number in range(first, end):
        start, stop = description.units[number].train
        units |= {name: number for name in names if start <= uses.get(name, -1) < stop}
    return units


def _first_use(description: ModelDescription, first: int, end: int) -> dict[str, int]:
    """Tensor of the state -> the first node of units [first, end) that uses it in training."""
    start, stop = description.node_range(first, end, "train")
    first_use: dict[str, int] = {}
    for index in range(start, stop):
        for reference in description.train.nodes[index].references():
            if isinstance(reference, StateRef):
                first_use.setdefault(reference.name, index)
    return first_use


def _as_it_lies(dense: Tensor) -> Tensor:
    """All elements in the order of their memory, 1-D."""
    return dense.as_strided((dense.numel(),), (1,))


def _part(flat: Tensor, entry: BucketSlice) -> Tensor:
    return flat[entry.place : entry.place + entry.elements]
