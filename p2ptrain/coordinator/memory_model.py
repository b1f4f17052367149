"""What a job takes of a device's memory beside what the planners count.

    process    what torch and we make for any job: compiled primitives, stacks, link buffers
    received   what crosses the cut before a stage stays until its backward
    wire       some slices of each cut that are arriving, waiting or leaving
    gradient   one unit's, computed by each micro-batch before it is added to the sum
    passing    in the last stage: gradients as large as what a unit keeps, less what those behind
               it kept; a language model keeps most of all in its last unit
    holes      free blocks of the heap that glibc reuses only for one of the same size, because
               torch wants them aligned to 64 bytes
    samples    on the data holder: loaded, and fed ahead of the stages that work on them
    copies     of tiles: maps with their halos, beside the tiles' own parts of them
    log        what was sent since the last stable snapshot, for a rebuild
    update     what Adam and its like need of the largest unit for a moment
    before     parameters and optimizer state before an optimistic update, until it counts; where
               there is no room for that, a stage waits for the commit

Beside an accelerator with a memory of its own, `process`, `wire`, `samples` and `log` are in the
host's, and all else in the accelerator's. Two things are in the host's for that reason alone:

    arriving   a stage's state, on its way into the accelerator; training begins when it is there
    summed     a group's gradients, while its devices sum them

A group whose devices compute with different things updates on the hosts: an accelerator's has the
optimizer's state, `before`, and the weights once more.

How close that comes, and how to measure it: docs/internals/memory.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.messages.round_orders import FED_AHEAD, LOADED_AHEAD
from p2ptrain.plan.cost.draft import StageGroup
from p2ptrain.plan.types.allocation import TileShape
from p2ptrain.plan.types.cluster import PROCESSOR
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.plan.types.plan import Plan, PlannedStage
from p2ptrain.plan.types.profile import Profile, Unit
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.process.host_process import APART_BYTES, MMAP_THRESHOLD_BYTES
from p2ptrain.process.memory_budget import PROCESS_BYTES
from p2ptrain.recovery.rebuild_plan import replay_log_bytes
from p2ptrain.recovery.recovery_settings import HOME
from p2ptrain.tiling.planning.profile_maps import copied_bytes, tiled_network

PIECES_AT_A_CUT = 3
"""Two ahead of the schedule (its depths differ by two from stage to stage), one on its way back."""

HOLE_SHARE = 1 / 3
"""Of what a micro-batch takes and frees: activations and gradients. Measured, where freed pieces
merge (`cli.merging_heap`): 0.15 (ViT, ConvNeXt), 0.3 (DenseNet, GPT), 0.6 (U-Net, whose maps grow
towards the end)."""

HELD_HOLE_SHARE = 1 / 12
"""Of the activations of other micro-batches, which stay while that one comes and goes."""

RATIO_WITH_TEMPORARIES = 2.0
"""Optimizers that keep as much for a parameter compute in memory of its size beside it."""

USUAL_DEPTH = 4
"""Of a first stage, as long as it is not known."""


def reserved_bytes(
    profile: Profile, request: JobPlanRequest, memory: MemoryBudgets, *, holder: bool
) -> int:
    """What a device must keep free of units where it computes, before it is known which it gets."""
    largest = max(unit.trained_bytes for unit in profile.units)
    piece = request.micro_batch or request.batch_size
    if request.asynchrony is not None:
        piece = request.asynchrony.piece(request.batch_size, request.micro_batch)
    fed = _fed_bytes(profile, piece, USUAL_DEPTH, request) if holder else 0
    return NeededMemory(largest, PROCESS_BYTES + fed).of(memory).compute_bytes


def with_full_memory(
    plan: Plan,
    profile: Profile,
    request: JobPlanRequest,
    holder: str,
    memory: Mapping[str, MemoryBudgets],
    kinds: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """`plan`, whose predicted peaks count all that its devices take from now on.

    Its stages make updates ahead where all of their devices have memory for that too.

    Args:
        kinds: with what each device computes; of those that are missing: a processor.
    """
    at_home = [updated_on_host(stage, kinds) for stage in plan.stages]
    needed = {
        name: _needed(plan, profile, request, name, holder, at_home).of(memory[name])
        for name in plan.predicted.peak_bytes
    }
    stages = []
    for stage, on_hosts in zip(plan.stages, at_home, strict=True):
        before = profile.state(*stage.units).changing_bytes
        names = [device.name for device in stage.devices]
        with_before = {
            name: needed[name].with_host(needed[name].of_host + before)
            if name in on_hosts
            else replace(needed[name], compute_bytes=needed[name].compute_bytes + before)
            for name in names
        }
        has_room = all(memory[name].shortage(more) is None for name, more in with_before.items())
        ahead = has_room and _may_go_ahead(plan, request, holder, kinds)
        if ahead:
            needed |= with_before
        turn = stage.turn if ahead else None
        stages.append(replace(stage, goes_ahead=ahead, turn=turn))
    on_host = {name: one.host_bytes for name, one in needed.items() if one.host_bytes is not None}
    predicted = replace(
        plan.predicted,
        peak_bytes={name: one.compute_bytes for name, one in needed.items()},
        host_peak_bytes=on_host or None,
    )
    return replace(plan, stages=tuple(stages), predicted=predicted)


def updated_on_host(stage: PlannedStage, kinds: Mapping[str, str]) -> frozenset[str]:
    """The accelerators of a stage whose devices compute with different things."""
    found = {device.name: kinds.get(device.name, PROCESSOR) for device in stage.devices}
    if len({*found.values()}) == 1:
        return frozenset()
    return frozenset(name for name, kind in found.items() if kind != PROCESSOR)


def _may_go_ahead(
    plan: Plan, request: JobPlanRequest, holder: str, kinds: Mapping[str, str]
) -> bool:
    """Whether an update waits for nothing but the commit, and another device gives it.

    An accelerator is another one: it stands still while its host looks at what it has computed.
    Tiles wait for one another all the time.
    """
    alone = plan.device_names == {holder} and kinds.get(holder, PROCESSOR) == PROCESSOR
    tiled = plan.stages[0].tiling is not None
    return not (alone or tiled or request.clip or plan.mode is PlanMode.ASYNC)


def taken_beside_bytes(taken_bytes: int) -> int:
    """Of what a job had taken of a device before its plan, what the plan does not count."""
    return max(taken_bytes - PROCESS_BYTES, 0)


@dataclass(frozen=True, slots=True)
class NeededMemory:
    """What a plan takes of one device.

    Attributes:
        in_compute_bytes: what lies where the device computes.
        beside_bytes: what lies in the host's memory, whatever computes.
        arriving_bytes, summed_bytes: what passes through the host's on its way to or from an
            accelerator's own memory; elsewhere they are what is trained.
        weights_bytes: of weights that the host has too, because it updates them.
        changing_bytes: of these and of their optimizer's state, which an accelerator's memory lacks
            then.
    """

    in_compute_bytes: int
    beside_bytes: int
    arriving_bytes: int = 0
    summed_bytes: int = 0
    weights_bytes: int = 0
    changing_bytes: int = 0

    def of(self, memory: MemoryBudgets) -> MemoryBudgets:
        """In the memories that a device has."""
        if memory.host_bytes is None:
            return MemoryBudgets(self.in_compute_bytes + self.beside_bytes + self.weights_bytes)
        trains = self.beside_bytes + self.summed_bytes + self.changing_bytes
        begins = PROCESS_BYTES + self.arriving_bytes + self.weights_bytes
        moved_bytes = self.changing_bytes - self.weights_bytes
        return MemoryBudgets(max(self.in_compute_bytes - moved_bytes, 0), max(trains, begins))


def _needed(
    plan: Plan,
    profile: Profile,
    request: JobPlanRequest,
    name: str,
    holder: str,
    at_home: Sequence[Collection[str]],
) -> NeededMemory:
    """`at_home`: by stage, the accelerators whose hosts update it."""
    parts = [*_parts(plan, profile, name)]
    inside = plan.predicted.peak_bytes[name] + sum(part.extra_bytes for part in parts)
    beside = PROCESS_BYTES + sum(part.wire_bytes for part in parts)
    if name == holder:
        beside += _fed_bytes(profile, plan.micro_batch, plan.stages[0].warmup, request)
    if plan.mode is PlanMode.SYNC:
        sent = math.ceil(HOME.first_snapshot_rounds * sum(part.sent_bytes for part in parts))
        beside += min(sent, replay_log_bytes(inside + beside))
    own = [stage for stage in plan.stages if name in {device.name for device in stage.devices}]
    states = [
        profile.state(*stage.units)
        for stage, names in zip(plan.stages, at_home, strict=True)
        if name in names
    ]
    groups = [s for s in own if len(s.devices) > 1 and plan.mode is PlanMode.SYNC]
    return NeededMemory(
        inside,
        beside,
        arriving_bytes=sum(profile.state(*stage.units).version_bytes for stage in own),
        summed_bytes=sum(profile.state(*stage.units).summed_bytes for stage in groups),
        weights_bytes=sum(state.trainable_bytes for state in states),
        changing_bytes=sum(state.changing_bytes for state in states),
    )


def _fed_bytes(profile: Profile, micro_batch: int, depth: int, request: JobPlanRequest) -> int:
    """Pieces in the loader and in the feeder's queues; of rounds never more than two."""
    samples = (LOADED_AHEAD + 2 * FED_AHEAD + depth) * micro_batch
    if request.asynchrony is None:
        samples = min(samples, 2 * request.batch_size)
    return samples * (profile.input_bytes + profile.target_bytes)


@dataclass(frozen=True, slots=True)
class _StageMemory:
    """A stage on one device.

    Attributes:
        entering_bytes, leaving_bytes: across the cuts before and after it, of one sample.
        piece: most samples of a micro-batch that are this device's; of tiles, a part of each.
        in_flight: most samples between forward and backward, the same.
        samples: of a round.
        accumulates: whether it has several micro-batches a round.
        waiting: gradients of whole mini-batches that wait to be applied in order: one of each
            device, where these take mini-batches in turn.
        copies_bytes: of tiles, maps with their halos, of all micro-batches in flight.
    """

    units: tuple[Unit, ...]
    optimizer_state_ratio: float
    entering_bytes: int
    leaving_bytes: int
    piece: float
    in_flight: float
    samples: float
    accumulates: bool
    waiting: int
    copies_bytes: int = 0

    @property
    def wire_bytes(self) -> int:
        """Of the cuts before and after it."""
        return math.ceil(self._wire)

    @property
    def _wire(self) -> float:
        return PIECES_AT_A_CUT * self.piece * (self.entering_bytes + self.leaving_bytes)

    @property
    def sent_bytes(self) -> float:
        """To the stages before and after it, in a round."""
        return self.samples * (self.entering_bytes + self.leaving_bytes)

    @property
    def extra_bytes(self) -> int:
        """Beside parameters, gradients, optimizer state, the units' own activations, and wire."""
        trained = [unit.trained_bytes for unit in self.units]
        kept = sum(unit.activation_bytes for unit in self.units)
        received = self.in_flight * self.entering_bytes
        gradient = max(trained) if self.accumulates else 0
        in_heap = sum(count for count in trained if count < MMAP_THRESHOLD_BYTES)
        passing = math.ceil(self.piece * self._max_passing_bytes())
        holes = int(HOLE_SHARE * (self.piece * kept + in_heap))
        holes += int(HELD_HOLE_SHARE * (self.in_flight - self.piece) * kept)
        update = 0
        if self.optimizer_state_ratio >= RATIO_WITH_TEMPORARIES and max(trained) > APART_BYTES:
            update = max(trained)
        waiting = self.waiting * sum(trained)
        own = gradient + passing + update + holes + waiting
        crossing = math.ceil(received + self._wire) - self.wire_bytes
        return crossing + own + self.copies_bytes

    def _max_passing_bytes(self) -> int:
        """Of one sample: a model's backward begins with as much for a unit's gradients as the unit
        keeps, and has freed what those behind it kept. Elsewhere gradients arrive, and count as
        what is on the wire; what a unit takes beyond what it keeps does not.
        """
        begins = not self.leaving_bytes
        most = free = 0
        for unit in reversed(self.units):
            kept, passing = unit.activation_bytes, unit.passing_bytes or 0
            taken = max(kept, passing) if begins else passing - kept
            most = max(most, taken - free)
            free += kept
        return most


def _parts(plan: Plan, profile: Profile, name: str) -> Iterator[_StageMemory]:
    for stage in plan.stages:
        for place, device in enumerate(stage.devices):
            if device.name == name:
                yield _part(plan, profile, stage, place)


def _part(plan: Plan, profile: Profile, stage: PlannedStage, place: int) -> _StageMemory:
    shares = tuple(device.share for device in stage.devices)
    if stage.tiling is not None:
        return _tiled_part(plan, profile, stage, stage.tiling, place)
    group = StageGroup(tuple(range(len(shares))), shares, stage.allocation)
    pieces = group.piece_counts(plan.split, place)
    depth = stage.warmup if stage.held is None else stage.held
    first, end = stage.units
    return _StageMemory(
        units=profile.units[first:end],
        optimizer_state_ratio=profile.optimizer_state_ratio,
        entering_bytes=profile.units[first - 1].output_bytes if first else 0,
        leaving_bytes=profile.units[end - 1].output_bytes,
        piece=max(pieces, default=0),
        in_flight=group.in_flight_samples(plan.split, place, depth),
        samples=group.round_samples(plan.split, place),
        accumulates=sum(pieces.values()) > 1,
        waiting=len(shares) if len(shares) > 1 and plan.mode is PlanMode.ASYNC else 0,
    )


def _tiled_part(
    plan: Plan, profile: Profile, stage: PlannedStage, tiling: TileShape, place: int
) -> _StageMemory:
    """Tiles of one device: as if their part of every map were that part of the samples."""
    shares = [device.share for device in stage.devices]
    first, end = stage.units
    piece = tiling.areas(shares)[place] * plan.micro_batch
    network = tiled_network(profile)
    known = network is not None and end <= len(network.units)  # else the stage says what is wrong
    copied = copied_bytes(network, tiling, shares)[place] if network and known else 0
    return _StageMemory(
        units=profile.units[first:end],
        optimizer_state_ratio=profile.optimizer_state_ratio,
        entering_bytes=profile.input_bytes,
        leaving_bytes=profile.units[end - 1].output_bytes,
        piece=piece,
        in_flight=stage.warmup * piece,
        samples=plan.micro_batches * piece,
        accumulates=plan.micro_batches > 1,
        waiting=0,
        copies_bytes=stage.warmup * plan.micro_batch * copied,
    )
