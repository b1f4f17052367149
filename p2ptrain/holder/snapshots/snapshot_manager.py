"""The holder's side of snapshots: which versions exist, where they are, what may be released.

    train.round {keep, stay} ──► devices copy, offer ──► snapshot.kept
                                       stable: versions.keep to all ◄──┤
                           failed: snapshot.backup_peer to the owner ◄─┘

The shell of `recovery.snapshot_tracker` and `recovery.snapshot_schedule`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from time import monotonic

from p2ptrain import failpoints
from p2ptrain.aio.tasks import TaskOwner
from p2ptrain.errors import PeerError
from p2ptrain.holder.snapshots.full_snapshots import FullSnapshots
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh, display_name
from p2ptrain.messages.assignment import Assignment
from p2ptrain.messages.kinds import BACKUP_PEER, SNAPSHOT_KEPT, VERSIONS_KEEP
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.messages.snapshots import BackupAssignment, RetainSnapshots, SnapshotKept
from p2ptrain.net.message import Message
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings
from p2ptrain.recovery.snapshot_schedule import SnapshotCost, SnapshotSchedule
from p2ptrain.recovery.snapshot_tracker import (
    KeepingResult,
    SnapshotAbandoned,
    SnapshotComplete,
    SnapshotTracker,
    TryBackupPeer,
)
from p2ptrain.recovery.version import Version

log = get_logger(__name__)

EARLY_LIMIT = 1024
"""Most words about copies that wait until their version counts; a household has fewer stages."""

NO_COST = SnapshotCost(0.0, (), 0.0)
"""Without an estimate: rounds alone say how often."""


class SnapshotManager:
    """See the module. One a job, in its event loop; `close` it.

    Attributes:
        stable: what one goes back to, None while there is nothing but the first weights.
        readers: each says which version it still reads, if any; that one stays.
        whole: copies of all stages in this process's memory; None where none are made.
        have_travelled: whether copies were on their way in the round that has ended last.
    """

    def __init__(
        self,
        mesh: Mesh,
        job: str,
        on_stable: Callable[[Version], None],
        warn: Callable[[str], None],
        fixed: Callable[[int, int], bool] | None = None,
        settings: RecoverySettings = HOME,
        *,
        is_on: bool = True,
    ) -> None:
        """Nothing is kept yet.

        Args:
            on_stable: called with each stable version.
            warn: warns the user.
            fixed: as of `SnapshotSchedule`.
            is_on: whether versions are kept to go back to.
        """
        self._is_on = is_on
        self._fixed = fixed
        self._settings = settings
        self.stable: Version | None = None
        self.readers: list[Callable[[], Version | None]] = []
        self.whole: FullSnapshots | None = None
        self.have_travelled = False
        self._mesh = mesh
        self._job = job
        self._on_stable = on_stable
        self._warn = warn
        self._warned: set[str] = set()
        self._keeping = SnapshotTracker()
        self._cadence: SnapshotSchedule | None = None
        self._cost: SnapshotCost | None = None
        self._generation = 0
        self._counted = 0  # updates that all stages have made
        self._early: list[tuple[str, SnapshotKept]] = []  # of versions after that
        self._reporting: asyncio.Task[None] | None = None
        self._tasks = TaskOwner(self._on_failed)
        mesh.route(SNAPSHOT_KEPT, self._kept)

    @property
    def read(self) -> tuple[Version, ...]:
        """Versions that a device still reads."""
        found = [reader() for reader in self.readers]
        if self.whole is not None:
            found.append(self.whole.reading)
        return tuple(version for version in found if version is not None)

    def begin(
        self, assignment: Assignment, cost: SnapshotCost | None, stable: Version | None
    ) -> None:
        """A generation begins.

        Args:
            cost: of one version, None where it is what it was.
            stable: what one goes back to now.
        """
        placed, now = assignment.placed, monotonic()
        if self.whole is not None:
            self.whole.begin()
        self.stable, self._generation = stable, placed.generation
        self._cost = cost or self._cost or NO_COST
        self._counted, self._early = placed.version.step, []
        self._keeping.begin(placed)
        self._cadence = None
        if placed.protects and self._is_on:
            self._cadence = SnapshotSchedule(
                self._cost, placed.version.step, now, self._fixed, self._settings
            )
            if placed.keeps:
                self._cadence.ordered(placed.version.step, now)

    def drain(self) -> None:
        """The generation ends soon: what is held here may be resumed from, and stays."""
        if self.whole is not None:
            self.whole.pause()

    def end_generation(self) -> None:
        """What was on its way will not be waited for."""
        self.drain()
        self._early = []
        self._keeping.end()
        self._cadence = None

    def wants(self, step: int) -> bool:
        """Whether the version after `step` updates is to be kept."""
        self._give_up_late()
        return self._cadence is not None and self._cadence.wants(step)

    def ordered(self, order: RoundOrder) -> RoundOrder:
        """Snapshot the result of the round; returns the order that says so."""
        self._give_up_late()
        version = Version(order.round.step + 1, self._generation)
        offer = self._keeping.ordered(version)
        if offer and self._cadence is not None:
            self._cadence.ordered(version.step, monotonic())
        stable = () if self.stable is None else (self.stable,)
        named = dict.fromkeys((*stable, *self.read, *self._keeping.under_way, version))
        return replace(order, keep=True, stay=tuple(named), offer=offer)

    def round_done(self, step: int) -> None:
        """A round of training has ended: `step` updates count."""
        cadence = self._cadence
        self.have_travelled = cadence is not None and cadence.round_done(step, monotonic())
        self._counted = step
        due = [said for said in self._early if said[1].copy.version.step <= step]
        self._early = [said for said in self._early if said[1].copy.version.step > step]
        for peer, kept in due:
            self._take(self._keeping.acknowledged(peer, kept.copy, kept.failed))

    def pause_over(self) -> None:
        """Something that is no training took the time until now."""
        if self._cadence is not None:
            self._cadence.pause_over(monotonic())

    def keep_only(self, versions: Collection[Version], members: Collection[str]) -> None:
        """Notify `members` that versions older than these may go.

        A slow member delays no other, and gets the next such message instead.
        """
        message = Message(VERSIONS_KEEP, RetainSnapshots(self._job, tuple(versions)).fields())
        if self._reporting is not None:
            self._reporting.cancel()
        self._reporting = self._tasks.spawn(
            self._notify_all(sorted(members), message), "versions to keep"
        )

    async def close(self) -> None:
        """Receive, send and read nothing any more."""
        self._mesh.unroute(SNAPSHOT_KEPT)
        if self.whole is not None:
            await self.whole.close()
        await self._tasks.cancel()

    # -- what devices say ------------------------------------------------------------------------

    async def _kept(self, peer: str, message: Message) -> None:
        kept = SnapshotKept.read(message.fields)
        if kept.job != self._job:
            return
        version = kept.copy.version
        if version.step > self._counted and version in self._keeping.under_way:
            # without a barrier it may be there before all stages have made that update
            if len(self._early) < EARLY_LIMIT:
                self._early.append((peer, kept))
            return
        found = self._keeping.acknowledged(peer, kept.copy, kept.failed)
        if any(isinstance(result, SnapshotComplete) for result in found):
            await failpoints.reach("stable.before", device=self._mesh.self_id)
        self._take(found)

    def _take(self, results: list[KeepingResult]) -> None:
        for result in results:
            match result:
                case SnapshotComplete(version):
                    self._end_one(whole=True)
                    self.stable = version
                    log.info("version_stable", step=version.step, computed=version.computed)
                    if self.whole is not None:
                        self.whole.stable(version)
                    self._on_stable(version)
                case TryBackupPeer():
                    self._tasks.spawn(self._try_backup_peer(result), "another backup peer")
                case SnapshotAbandoned():
                    self._end_one(whole=False)
                    self._report_abandoned(result)

    def _give_up_late(self) -> None:
        cadence = self._cadence
        if cadence is not None and cadence.is_late(monotonic()):
            cadence.gave_up()
            self._take(self._keeping.give_up("it took too long"))

    def _end_one(self, *, whole: bool) -> None:
        if self._cadence is not None and not self._keeping.under_way:
            self._cadence.ended(whole=whole)

    def _report_abandoned(self, what: SnapshotAbandoned) -> None:
        name = self._name(what.device)
        log.info("version_abandoned", step=what.version.step, device=name, why=what.why)
        line = f"{name} could not keep a copy of part {what.stage}: {what.why}"
        if what.device not in self._warned:
            self._warned.add(what.device)
            self._warn(f"{line}; training continues, but a failure now goes back to an older copy")

    # -- messages to devices -----------------------------------------------------------------------

    async def _try_backup_peer(self, what: TryBackupPeer) -> None:
        log.info("another_keeper", first=what.copy.first, backup_peer=self._name(what.backup_peer))
        order = BackupAssignment(self._job, what.copy, what.backup_peer)
        await self._send(what.owner, Message(BACKUP_PEER, order.fields()))

    async def _notify_all(self, members: list[str], message: Message) -> None:
        await failpoints.reach("versions.keep.between", device=self._mesh.self_id)
        await asyncio.gather(*(self._send(member, message) for member in members))

    async def _send(self, device: str, message: Message) -> None:
        try:
            await self._mesh.send(device, message)
        except PeerError as error:
            # the end of the link ends the generation, or the next such word says as much
            log.info(
                "not_informed_of_copies", kind=message.kind, device=device[:12], why=str(error)
            )

    def _name(self, device: str) -> str:
        return display_name(self._mesh, device)

    @staticmethod
    def _on_failed(work: str, error: BaseException) -> None:
        log.error("copies_not_reported", work=work, exc_info=error)
