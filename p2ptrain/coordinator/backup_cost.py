"""The backups of a plan: which peer keeps them, what they cost, which stages have none. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from p2ptrain.coordinator.measured_cluster import MeasuredDevice, overheads_of, to_profile
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.plan.types.cluster import REFERENCE, ClusterLink, Overheads
from p2ptrain.plan.types.gradient_sums import ring_bytes
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.recovery.backup_placement import (
    SLOTS,
    SLOTS_WITH_CHECKPOINTS,
    KeptBytes,
    UnbackedStage,
    assign_backup_peers,
    copies_bytes,
)
from p2ptrain.recovery.placement import PlacedStage, is_elsewhere
from p2ptrain.recovery.snapshot_schedule import SnapshotCost, SnapshotTransfer, read_bytes

COPIES_AN_UPDATE_BYTE = 1.0
"""A byte copied into memory that is there costs as much as one of an update."""

DIGESTS_AN_UPDATE_BYTE = 0.5
"""A byte's checksum, in the same measure."""

COPIES_A_MESSAGE_BYTE = 0.4
"""A byte of megabytes that are read at a time, in the measure of one among training's messages:
four fifths of the processor time, of which a device with two cores waits for
half."""

MESSAGES_A_COPY = 4
"""At the owner as at the backup peer: the offer, the manifest's two, and the holder's message about
it."""

MESSAGES_A_READ = 2


@dataclass(frozen=True, slots=True)
class PlanBackups:
    """A plan's stages with their backup peers.

    Attributes:
        cost: None where nothing is kept.
        taken_bytes: most that copies take, by device.
        warnings: for the user, a line a stage of which no copy is kept.
    """

    stages: tuple[PlacedStage, ...]
    cost: SnapshotCost | None
    warnings: tuple[str, ...] = ()
    taken_bytes: Mapping[str, int] = field(default_factory=dict)


def plan_backups(
    request: JobPlanRequest,
    plan: Plan,
    stages: Sequence[PlacedStage],
    candidates: Mapping[str, MeasuredDevice],
    links: Mapping[tuple[str, str], ClusterLink],
    holder: str,
) -> PlanBackups:
    """Give the stages of a new plan their backup peers.

    Args:
        stages: the plan's, with ids.
        candidates: by id, all devices of the plan.
        links: by names.
        holder: id of the device with the data.
    """
    profile = to_profile(candidates[_any_of(candidates, stages)].measured, request)
    sizes = [_kept_bytes(profile, stage) for stage in stages]
    read = _read_bytes(stages, sizes, holder) if request.checkpoints else {}
    if not request.replicas:
        return PlanBackups(tuple(stages), None, taken_bytes=read)
    needed = plan.predicted.needed
    spare = {  # copies are kept in the host's memory
        device: one.memory.of_host - needed(one.name).in_memories_of(one.memory).of_host
        for device, one in candidates.items()
    }
    own_slots = SLOTS_WITH_CHECKPOINTS if request.checkpoints else SLOTS
    found = assign_backup_peers(stages, sizes, spare, own_slots)
    copied = found.stages
    if is_elsewhere(stages, holder):  # which reads as many versions as a backup peer
        copied = tuple(replace(stage, copies_to=holder) for stage in stages)
    names = {device: candidate.name for device, candidate in candidates.items()}
    warnings = tuple(_warning(one, names) for one in found.unprotected)
    cost = _cost(profile, sizes, plan, copied, candidates, links)
    if cost is None:
        return PlanBackups(found.stages, None, warnings, read)
    taken = copies_bytes(copied, sizes, own_slots)
    return PlanBackups(found.stages, cost, warnings, taken)


def _read_bytes(
    stages: Sequence[PlacedStage], sizes: Sequence[KeptBytes], holder: str
) -> dict[str, int]:
    """What one version takes that is kept for a checkpoint alone, by device."""
    read: dict[str, int] = defaultdict(int)
    for stage, size in zip(stages, sizes, strict=True):
        read[holder if holder in stage.devices else stage.devices[0]] += size.changing
    return dict(read)


def snapshot_cost(
    request: JobPlanRequest,
    plan: Plan,
    stages: Sequence[PlacedStage],
    candidates: Mapping[str, MeasuredDevice],
    links: Mapping[tuple[str, str], ClusterLink],
) -> SnapshotCost | None:
    """Of one version of stages that have their backup peers; None where nothing is kept."""
    profile = to_profile(candidates[_any_of(candidates, stages)].measured, request)
    sizes = [_kept_bytes(profile, stage) for stage in stages]
    return _cost(profile, sizes, plan, stages, candidates, links)


def _cost(
    profile: Profile,
    sizes: Sequence[KeptBytes],
    plan: Plan,
    stages: Sequence[PlacedStage],
    candidates: Mapping[str, MeasuredDevice],
    links: Mapping[tuple[str, str], ClusterLink],
) -> SnapshotCost | None:
    if all(stage.copies_to is None for stage in stages):
        return None
    names = {device: candidate.name for device, candidate in candidates.items()}
    overheads = {device: overheads_of(one) or REFERENCE for device, one in candidates.items()}
    ways = [_way(stage, names, links) for stage in stages]
    return SnapshotCost(
        cpu_seconds=_cpu_seconds(stages, sizes, overheads, ways),
        transfers=tuple(_transfers(stages, sizes, profile, plan, ways)),
        round_seconds=plan.predicted.round_seconds,
    )


def _kept_bytes(profile: Profile, stage: PlacedStage) -> KeptBytes:
    """Parameters and optimizer state; buffers are small beside them."""
    state = profile.state(stage.first, stage.end)
    return KeptBytes(state.changing_bytes, state.frozen_bytes)


def _any_of(candidates: Mapping[str, MeasuredDevice], stages: Sequence[PlacedStage]) -> str:
    """Whose profile says how large units are: all say the same."""
    return next(device for stage in stages for device in stage.devices if device in candidates)


def _warning(missing: UnbackedStage, names: Mapping[str, str]) -> str:
    short = missing.short
    where = "" if short in (None, missing.device) else f" on {names[short or '']}"
    return (
        f"part {missing.stage} on {names[missing.device]} has no copy, for lack of memory{where}: "
        "if that device fails, training goes back to the last checkpoint, or ends"
    )


def _way(
    stage: PlacedStage, names: Mapping[str, str], links: Mapping[tuple[str, str], ClusterLink]
) -> ClusterLink | None:
    """From who has the stage to who keeps its copy."""
    backup_peer = stage.copies_to
    return None if backup_peer is None else links.get((names[stage.devices[0]], names[backup_peer]))


def _cpu_seconds(
    stages: Sequence[PlacedStage],
    sizes: Sequence[KeptBytes],
    overheads: Mapping[str, Overheads],
    ways: Sequence[ClusterLink | None],
) -> float:
    """Of the device that one version costs most."""
    spent: dict[str, float] = defaultdict(float)
    for stage, size, way in zip(stages, [size.changing for size in sizes], ways, strict=True):
        for device in stage.devices:
            spent[device] += size * COPIES_AN_UPDATE_BYTE * overheads[device].update_byte_seconds
        if stage.copies_to is not None:
            for device in (stage.devices[0], stage.copies_to):
                its = overheads[device]
                digest = DIGESTS_AN_UPDATE_BYTE * its.update_byte_seconds
                spent[device] += size * (digest + COPIES_A_MESSAGE_BYTE * its.byte_seconds)
                spent[device] += _messages(size, way) * its.message_seconds
    return max(spent.values(), default=0.0)


def _messages(size_bytes: int, way: ClusterLink | None) -> int:
    """That one copy takes, at either end."""
    reads = -(-size_bytes // read_bytes(way.bytes_per_s if way is not None else 0.0))
    return MESSAGES_A_COPY + MESSAGES_A_READ * max(reads, 1)


def _transfers(
    stages: Sequence[PlacedStage],
    sizes: Sequence[KeptBytes],
    profile: Profile,
    plan: Plan,
    ways: Sequence[ClusterLink | None],
) -> list[SnapshotTransfer]:
    batch = plan.split.batch_size if plan.mode is PlanMode.SYNC else plan.micro_batch
    carried = interface_bytes(stages, profile, batch)
    transfers = []
    for stage, size, way in zip(stages, sizes, ways, strict=True):
        if way is None or stage.copies_to is None:
            continue
        busiest = max(carried[stage.devices[0]], carried[stage.copies_to])
        transfers.append(
            SnapshotTransfer(size.changing / way.bytes_per_s, busiest / way.bytes_per_s)
        )
    return transfers


def interface_bytes(
    stages: Sequence[PlacedStage], profile: Profile, batch: int
) -> dict[str, float]:
    """What each device sends in a round; as much comes.

    At either border of its stages values go one way and their gradients the other, and sums of a
    group's gradients go around.
    """
    carried: dict[str, float] = defaultdict(float)
    for stage in stages:
        group = len(stage.devices)
        borders = [cut for cut in (stage.first, stage.end) if 0 < cut < len(profile.units)]
        crossing = batch * sum(profile.units[cut - 1].output_bytes for cut in borders)
        summed = ring_bytes(group, profile.state(stage.first, stage.end).summed_bytes)
        for device in stage.devices:
            carried[device] += crossing / group + summed
    return carried
