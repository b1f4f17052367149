"""Which device backs up which stage, where memory allows; and which versions survive a death.

A stage of one device copies to a device of the next stage, the last one to the stage before: these
take over. Devices of a group have the same weights and need no backup. Memory decides among them,
and where none of them has enough, any other device of the plan will do.

What backups take, beside the stages themselves (S bytes of a stage's state, F of frozen weights):

    every device of the plan     2 S of each of its own stages: the stable snapshot, the next one;
                                 with checkpoints 3 S: one may be read for long
    a backup peer of a stage     2 S of that stage, for the same reason, and F: versions share them

The next version is written while the old one is still the stable one. While one is on its way to
its backup peers no other is offered to them (`snapshot_tracker`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from p2ptrain.recovery.placement import PlacedStage
from p2ptrain.recovery.state_report import StateKind, StateReport
from p2ptrain.recovery.version import Version

SLOTS = 2
"""Versions of a stage that a device has room for: the one to go back to, and the next."""

SLOTS_WITH_CHECKPOINTS = 3
"""Of its own stages: one more, that the holder still reads while the next is on its way."""

_STAYS = (StateKind.KEPT, StateKind.REPLICA)
"""What a generation's beginning leaves where it is."""


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """How large a stage's versions are: parameters, optimizer state and buffers.

    Attributes:
        changing: what every version has of its own.
        frozen: weights that are the same in all versions.
    """

    changing: int
    frozen: int = 0

    def of_a_peer(self) -> int:
        """What its backup peer needs room for."""
        return SLOTS * self.changing + self.frozen


@dataclass(frozen=True, slots=True)
class UnbackedStage:
    """A stage of which no copy is kept.

    Attributes:
        stage: its number.
        device: the only one that has it.
        short: the device that has too little memory; None = no other device of the plan has enough.
    """

    stage: int
    device: str
    short: str | None = None


@dataclass(frozen=True, slots=True)
class BackupPlacement:
    """The stages with their backup peers, and those that have none though they are on one
    device."""

    stages: tuple[PlacedStage, ...]
    unprotected: tuple[UnbackedStage, ...] = ()


def assign_backup_peers(
    stages: Sequence[PlacedStage],
    sizes: Sequence[KeptBytes],
    spare_bytes: Mapping[str, int],
    own_slots: int = SLOTS,
) -> BackupPlacement:
    """Choose the backup peers.

    Args:
        sizes: by stage.
        spare_bytes: by device, memory that nothing else of the job takes; a device that is not
            named has none.
        own_slots: versions of an own stage that are here at once.

    Returns:
        The stages with `copies_to`. Where a device of the plan cannot keep its own part, no version
        would be whole, and nothing is kept. A plan of groups or of one device needs no copies.
    """
    bare = tuple(replace(stage, copies_to=None) for stage in stages)
    single = [p for p, stage in enumerate(bare) if len(stage.devices) == 1]
    if not single or len({device for stage in bare for device in stage.devices}) < 2:
        return BackupPlacement(bare)
    own = copies_bytes(bare, sizes, own_slots)
    left = {device: spare_bytes.get(device, 0) - taken for device, taken in own.items()}
    short = min(left, key=lambda device: (left[device], device))
    if left[short] < 0:
        return BackupPlacement(
            bare, tuple(UnbackedStage(p, bare[p].devices[0], short) for p in single)
        )
    backup_peers: dict[int, str] = {}
    # the largest first: they are the hardest to place
    for p in sorted(single, key=lambda p: (-sizes[p].of_a_peer(), p)):
        backup_peer = _backup_peer(bare, p, sizes[p].of_a_peer(), left)
        if backup_peer is not None:
            left[backup_peer] -= sizes[p].of_a_peer()
            backup_peers[p] = backup_peer
    return BackupPlacement(
        tuple(replace(stage, copies_to=backup_peers.get(p)) for p, stage in enumerate(bare)),
        tuple(UnbackedStage(p, bare[p].devices[0]) for p in single if p not in backup_peers),
    )


def copies_bytes(
    stages: Sequence[PlacedStage], sizes: Sequence[KeptBytes], own_slots: int = SLOTS
) -> dict[str, int]:
    """What copies take, by device: of its own stages, and of those it keeps."""
    taken = dict.fromkeys((device for stage in stages for device in stage.devices), 0)
    for stage, size in zip(stages, sizes, strict=True):
        for device in stage.devices:
            taken[device] += own_slots * size.changing
        if stage.copies_to is not None:
            taken[stage.copies_to] = taken.get(stage.copies_to, 0) + size.of_a_peer()
    return taken


def backup_peers_of(stages: Sequence[PlacedStage], index: int) -> tuple[str, ...]:
    """Who could keep a stage's copies, the best first: the next stage's devices, the one before's,
    then any other of the plan."""
    own = stages[index].devices
    near = [index + 1, index - 1]
    far = [p for p in range(len(stages)) if p not in (index, *near)]
    places = (stages[p].devices for p in (*near, *far) if 0 <= p < len(stages))
    return tuple(dict.fromkeys(d for devices in places for d in devices if d not in own))


def is_covered(
    version: Version, stages: Sequence[PlacedStage], state_reports: Mapping[str, StateReport]
) -> bool:
    """Whether `version` stays whole whichever one device dies, as far as `stages` are protected."""
    for stage in stages:
        twice = stage.copies_to is not None or len(stage.devices) > 1
        for unit in range(stage.first, stage.end):
            if len(set(_who_keeps(version, unit, state_reports))) < 1 + twice:
                return False
    return True


def _who_keeps(
    version: Version, unit: int, state_reports: Mapping[str, StateReport]
) -> Iterator[str]:
    for device, state_report in state_reports.items():
        for entry in state_report.entries:
            if entry.version == version and entry.kind in _STAYS and entry.has(unit):
                yield device


def _backup_peer(
    stages: Sequence[PlacedStage], index: int, needed_bytes: int, left: Mapping[str, int]
) -> str | None:
    """Of the nearest stage where anyone has room, the device with most of it."""
    candidates = backup_peers_of(stages, index)
    for p in (index + 1, index - 1):
        near = stages[p].devices if 0 <= p < len(stages) else ()
        found = _roomiest([d for d in near if d in candidates], needed_bytes, left)
        if found is not None:
            return found
    return _roomiest(candidates, needed_bytes, left)


def _roomiest(devices: Sequence[str], needed_bytes: int, left: Mapping[str, int]) -> str | None:
    """The one with most memory left, ties to the first; None = no device has enough."""
    best = max(devices, key=lambda device: left[device], default=None)
    return best if best is not None and left[best] >= needed_bytes else None
