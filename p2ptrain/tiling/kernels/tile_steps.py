"""What a tile does in each group, in order; the same for all tiles of a layout. No tensors.

A group's operators run in segments. Between two segments stands a normalisation, for which the
statistics of all tiles must have arrived. Autograd records each segment by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from p2ptrain.plan.types.feature_maps import MapNetwork
from p2ptrain.tiling.grid import GridLayout, HaloGroup


@dataclass(frozen=True, slots=True)
class TileSegment:
    """Operators that need nothing from other tiles.

    Attributes:
        operations: their numbers, ascending.
        reads: maps made before it.
        gives: maps it makes that are used behind it.
    """

    operations: tuple[int, ...]
    reads: tuple[int, ...]
    gives: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Normalise:
    """An operator that needs statistics of all tiles: map `read` -> map `made`."""

    operation: int
    read: int
    made: int


Step: TypeAlias = TileSegment | Normalise


def steps_of(layout: GridLayout, place: int) -> tuple[Step, ...]:
    """The steps of group number `place`."""
    network, group = layout.network, layout.groups[place]
    first = network.units[group.first].first
    end = network.units[group.end - 1].end
    used = [k for k in range(first, end) if layout.is_used(place, network.operations[k].output)]
    steps: list[Step] = []
    run: list[int] = []
    for k in used:
        operation = network.operations[k]
        if not operation.statistics:
            run.append(k)
            continue
        steps += _segment(layout, group, run, used)
        run = []
        steps.append(Normalise(k, operation.inputs[0], operation.output))
    return (*steps, *_segment(layout, group, run, used))


def fused_step(steps: Sequence[Step], group: HaloGroup, network: MapNetwork) -> Normalise | None:
    """The group's first step, where its statistics can travel with the halos of what it reads."""
    first = steps[0] if steps else None
    if not isinstance(first, Normalise) or first.read not in group.entering:
        return None
    return None if first.read in network.entering else first


@dataclass(frozen=True, slots=True)
class StepUses:
    """What lives how long around a step of a group.

    Attributes:
        later: maps that a later step of the group reads.
        done: maps that this step is the last to read.
        last_reads: of a segment: operation -> maps inside it that nothing reads any more after it.
    """

    later: frozenset[int]
    done: tuple[int, ...]
    last_reads: Mapping[int, tuple[int, ...]]


def uses_of(layout: GridLayout, steps: Sequence[Step]) -> tuple[StepUses, ...]:
    """By step of one group."""
    found: list[StepUses] = []
    later: frozenset[int] = frozenset()
    for step in reversed(steps):
        reads = step.reads if isinstance(step, TileSegment) else (step.read,)
        last_reads = _last_reads(layout, step) if isinstance(step, TileSegment) else {}
        found.append(StepUses(later, tuple(n for n in reads if n not in later), last_reads))
        later |= frozenset(reads)
    return tuple(reversed(found))


def _last_reads(layout: GridLayout, segment: TileSegment) -> dict[int, tuple[int, ...]]:
    operations = layout.network.operations
    last = {number: k for k in segment.operations for number in operations[k].inputs}
    by_operation: dict[int, tuple[int, ...]] = {}
    for number, k in last.items():
        if number not in segment.gives:
            by_operation[k] = (*by_operation.get(k, ()), number)
    return by_operation


def _segment(
    layout: GridLayout, group: HaloGroup, run: list[int], used: list[int]
) -> Iterable[TileSegment]:
    if not run:
        return
    operations = layout.network.operations
    made = {operations[k].output for k in run}
    read = {number for k in run for number in operations[k].inputs}
    later = {number for k in used if k > run[-1] for number in operations[k].inputs}
    gives = made & (later | set(group.leaving))
    yield TileSegment(tuple(run), tuple(sorted(read - made)), tuple(sorted(gives)))


@dataclass(frozen=True, slots=True)
class Halo:
    """A region of a map that enters a group, on the way forward.

    The layout's transfer with the same group, map, sender and receiver says which region.
    """

    group: int
    map: int


@dataclass(frozen=True, slots=True)
class HaloGradient:
    """The gradient of what `Halo` brought, on the way back to its owner."""

    group: int
    map: int


@dataclass(frozen=True, slots=True)
class Moments:
    """A tile's sums for an operation that normalises: see `normalisation`."""

    operation: int


@dataclass(frozen=True, slots=True)
class GradientSums:
    """A tile's two sums for the backward of an operation that normalises."""

    operation: int


Subject: TypeAlias = Halo | HaloGradient | Moments | GradientSums


@dataclass(frozen=True, slots=True)
class TileMessage:
    """From one tile to another.

    Attributes:
        sender, receiver: tiles.
        subject: what it is; one message each for a (subject, sender, receiver) of a pass.
        tensor: samples x channels x rows x columns; of sums 2 x channels, float64.
    """

    sender: int
    receiver: int
    subject: Subject
    tensor: Tensor
