"""Which snapshots are on their way, and when a version is stable. Pure.

    ordered ──► every device of the plan copies its stages ──► those of single devices reach peers
                                                                            │
    older versions go ◄── stable: every device that should have it has acknowledged ◄┘

A version is stable once every stage is acknowledged: a backed-up one by its peer, any other by
each of its devices, about its own snapshot. A peer that fails is replaced by the next best device;
when there is none left, the version is abandoned, and the older one stays stable.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from p2ptrain.recovery.backup_placement import backup_peers_of
from p2ptrain.recovery.placement import PlacedStage, Placement
from p2ptrain.recovery.state_report import StageCopy
from p2ptrain.recovery.version import Version

_Copy: TypeAlias = tuple[int, str]
"""(stage, device that has to say it has a copy of it)."""


@dataclass(frozen=True, slots=True)
class SnapshotComplete:
    """Every copy of `version` is acknowledged: it is what one goes back to."""

    version: Version


@dataclass(frozen=True, slots=True)
class TryBackupPeer:
    """Order `owner` to offer its copy, and later ones of these units, to `backup_peer`."""

    owner: str
    backup_peer: str
    copy: StageCopy


@dataclass(frozen=True, slots=True)
class SnapshotAbandoned:
    """`version` will not be whole.

    Attributes:
        stage: that has no copy of it.
        device: that could not keep it.
        why: as it said.
    """

    version: Version
    stage: int
    device: str
    why: str


KeepingResult: TypeAlias = SnapshotComplete | TryBackupPeer | SnapshotAbandoned


class SnapshotTracker:
    """The holder's account of copies, one a job."""

    def __init__(self) -> None:
        """Nothing is kept yet."""
        self._placed: Placement | None = None
        self._stages: tuple[PlacedStage, ...] = ()  # with the backup peers that are asked now
        self._missing: dict[Version, set[_Copy]] = {}  # by version on its way, the oldest first
        self._failed: set[_Copy] = set()  # backup peers of this generation that could not

    @property
    def under_way(self) -> tuple[Version, ...]:
        """Versions that are neither whole nor given up, the oldest first."""
        return tuple(self._missing)

    @property
    def protects(self) -> bool:
        """Whether the plan in force keeps copies."""
        return self._placed is not None and self._placed.protects

    def begin(self, placed: Placement) -> None:
        """A generation begins; what was on its way is not any more."""
        self._placed, self._stages = placed, placed.stages
        self._missing.clear()
        self._failed.clear()
        if placed.keeps:
            self.ordered(placed.version)

    def end(self) -> None:
        """The generation is over: what its devices still say is not waited for any more."""
        self._placed = None
        self._missing.clear()

    def ordered(self, version: Version) -> bool:
        """A round says that what it gives is kept; whether other devices shall have copies of it.

        Not while another one is on its way: where versions come faster than copies travel, none
        would ever be whole.
        """
        if not self.protects or self._missing:
            return False
        self._missing[version] = {
            (p, device)
            for p, stage in enumerate(self._stages)
            for device in ((stage.copies_to,) if stage.copies_to else stage.devices)
        }
        return True

    def acknowledged(
        self, device: str, copy: StageCopy, failed: str | None = None
    ) -> list[KeepingResult]:
        """A device has a copy of a stage, or why it has not."""
        placed, stage, version = self._placed, self._stage_of(copy), copy.version
        missing = self._missing.get(version)
        if stage is None or missing is None or placed is None:
            return []
        if placed.generation != copy.generation:
            return []
        if failed is not None:
            return self._on_failed(stage, device, copy, failed)
        missing.discard((stage, device))
        if missing:
            return []
        # older ones would not be used any more
        self._missing = {v: m for v, m in self._missing.items() if v.age > version.age}
        return [SnapshotComplete(version)]

    def give_up(self, why: str) -> list[KeepingResult]:
        """The oldest version on its way has taken too long."""
        for version, missing in self._missing.items():
            stage, device = min(missing)
            del self._missing[version]
            return [SnapshotAbandoned(version, stage, device, why)]
        return []

    def _stage_of(self, copy: StageCopy) -> int | None:
        for p, stage in enumerate(self._stages):
            if (stage.first, stage.end) == (copy.first, copy.end):
                return p
        return None

    def _on_failed(self, p: int, device: str, copy: StageCopy, why: str) -> list[KeepingResult]:
        stage, version = self._stages[p], copy.version
        if device in stage.devices:  # it has no copy of its own, to be offered or to count
            return self._abandon(version, p, device, why)
        if device != stage.copies_to:
            return []  # a backup peer that is not asked any more, or a device that never was
        self._failed.add((p, device))
        untried = [k for k in backup_peers_of(self._stages, p) if (p, k) not in self._failed]
        if not untried:
            self._failed = {copy for copy in self._failed if copy[0] != p}
            return self._abandon(version, p, device, why)
        backup_peer = untried[0]
        self._stages = (
            *self._stages[:p],
            replace(stage, copies_to=backup_peer),
            *self._stages[p + 1 :],
        )
        for missing in self._missing.values():
            if (p, device) in missing:
                missing.discard((p, device))
                missing.add((p, backup_peer))
        return [TryBackupPeer(stage.devices[0], backup_peer, copy)]

    def _abandon(self, version: Version, p: int, device: str, why: str) -> list[KeepingResult]:
        del self._missing[version]
        return [SnapshotAbandoned(version, p, device, why)]
