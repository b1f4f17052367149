"""Snapshots of stages: this device's own, offered to backup peers, and those it keeps for others.

    update ──► copy (compute thread) ──► checksums (another thread) ──► kept ──► offer ──► peer
                                                          peer: whole, or why not ──► holder

A backup peer reads them at bulk priority and checks them before they replace older ones:

    offer ──► manifest ──► unchanged tensors stay ──► one short read after the other,
                                                      spread until the next offer is due

A backup counts only once all of it is here and fits its checksums.
`recovery.cores.worker_core` decides.
"""

from __future__ import annotations

import asyncio
from functools import partial

from torch import Tensor

from p2ptrain import failpoints
from p2ptrain.aio.tasks import TaskOwner, run_in_background
from p2ptrain.errors import PeerError, size_text
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.kinds import SNAPSHOT_KEPT, SNAPSHOT_OFFER
from p2ptrain.messages.snapshots import SnapshotKept, SnapshotOffer
from p2ptrain.net.fields import FrameFields
from p2ptrain.net.message import Message, Priority
from p2ptrain.process.memory_budget import available_memory_bytes, is_out_of_memory
from p2ptrain.recovery.cores.worker_core import WorkerCore
from p2ptrain.recovery.snapshot_schedule import ReadPacing, ReadRates, paced_seconds
from p2ptrain.recovery.state_report import StageCopy, StateEntry, StateKind
from p2ptrain.recovery.version import Version
from p2ptrain.state.checksums import Digest, digests_of
from p2ptrain.state.snapshot_store import Named, SnapshotStore
from p2ptrain.state.transfer_client import Known, Pace, TransferClient, TransferRequest
from p2ptrain.state.transfer_server import version_source
from p2ptrain.worker.hosted_stages import HostedStages
from p2ptrain.worker.job_store import JobStore

log = get_logger(__name__)


_Units = tuple[int, int]


class SnapshotService:
    """See the module. One a job; `stop` before a generation ends."""

    def __init__(self, mesh: Mesh, job: str, store: JobStore, core: WorkerCore) -> None:
        """Nothing is copied yet; `core` hears what becomes of each snapshot."""
        self._mesh = mesh
        self._job = job
        self._store = store
        self._core = core
        self._clock = asyncio.get_running_loop().time
        self._begun = self._clock()  # the generation: its first copies are spread from then on
        self._offered: dict[_Units, float] = {}  # when the newest offer of each stage came
        self._rates = ReadRates()
        self._reading: dict[_Units, asyncio.Task[None]] = {}  # the newest copy of each stage
        self._tasks = TaskOwner(self._on_failed)

    def begin(self, hosted: HostedStages) -> None:
        """These are the stages from now on."""
        self._begun = self._clock()
        for executor in hosted.executors.values():
            executor.update.on_kept = partial(self._copied, hosted)

    def offered(self, peer: str, offer: SnapshotOffer) -> None:
        """`peer` has a copy to be kept here."""
        if self._core.offered(peer, offer.copy):
            self._collect(peer, offer.copy, offer.nbytes)

    def copy_stages(self) -> None:
        """Copy them as they are; ask before the first round is ordered."""
        self._tasks.spawn(self._copy(), "copy the stages")

    def offer(self, peer: str, copy: StageCopy) -> None:
        """Offer an own copy to `peer`."""
        self._tasks.spawn(self._offer(peer, copy), "offer a copy")

    def report(self, holder: str, copy: StageCopy, failed: str | None) -> None:
        """Report to `holder` that a copy is whole here, or why it is not."""
        self._tasks.spawn(self._report(holder, copy, failed), "report a copy")

    async def stop(self) -> None:
        """Copy, offer and collect nothing any more. May be called again."""
        self._offered.clear()
        self._reading.clear()
        await self._tasks.cancel()

    @staticmethod
    def _on_failed(work: str, error: BaseException) -> None:
        log.error("not_replicated", work=work, exc_info=error)

    # -- own stages ------------------------------------------------------------------------------

    async def _copy(self) -> None:
        hosted = self._store.hosted
        if hosted is not None:
            await hosted.copy()

    def _copied(
        self, hosted: HostedStages, stage: int, version: Version, why_not: str | None
    ) -> None:
        place, generation = (
            hosted.assignment.stages[stage],
            hosted.assignment.key.generation,
        )
        if why_not is not None:
            log.warning("no_copy", stage=stage, step=version.step, why=why_not)
            copy = StageCopy(generation, place.first, place.end, version)
            self._core.copy_failed(copy, why_not)
            return
        entry = StateEntry(place.first, place.end, version, StateKind.KEPT)
        self._tasks.spawn(self._seal(hosted, stage, entry), f"checksums of stage {stage}")

    async def _seal(self, hosted: HostedStages, stage: int, entry: StateEntry) -> None:
        """Take the copy's checksums, beside the computing."""
        place = {"stage": stage, "step": entry.version.step - 1}
        await failpoints.reach("replica.copied", device=self._mesh.self_id, **place)
        copy = hosted.store.of(entry)
        if copy is None:
            return
        digests = await run_in_background(partial(digests_of, copy.tensors))
        if hosted.store.seal(entry, copy, digests):
            self._core.copied(entry.first, entry.end, entry.version)

    # -- messages --------------------------------------------------------------------------------

    async def _offer(self, peer: str, copy: StageCopy) -> None:
        kept = StateEntry(copy.first, copy.end, copy.version, StateKind.KEPT)
        found = None if self._store.copies is None else self._store.copies.of(kept)
        if found is None:  # dropped since: there is a newer one
            return
        nbytes = sum(tensor.nbytes for tensor in found.tensors.values())
        await self._send(peer, SNAPSHOT_OFFER, SnapshotOffer(self._job, copy, nbytes))
        await failpoints.reach("replica.offer.after", device=self._mesh.self_id)

    async def _report(self, holder: str, copy: StageCopy, failed: str | None) -> None:
        await failpoints.reach("replica.kept.before", device=self._mesh.self_id)
        await self._send(holder, SNAPSHOT_KEPT, SnapshotKept(self._job, copy, failed))
        await failpoints.reach("replica.kept.after", device=self._mesh.self_id)

    async def _send(self, peer: str, kind: str, said: FrameFields) -> None:
        try:
            await self._mesh.send(peer, Message(kind, said.fields()))
        except PeerError as error:
            # The end of the link ends the generation; the next one copies again.
            log.info("not_informed_of_copy", kind=kind, peer=peer[:12], why=str(error))

    # -- copies that this device reads for others, one at a time of any stage ----------------------

    def _collect(self, owner: str, copy: StageCopy, nbytes: int) -> None:
        """Read a copy of `nbytes`; what is being read of an older one is given up."""
        units = (copy.first, copy.end)
        if units in self._reading:
            self._reading[units].cancel()
        now = self._clock()
        seconds = paced_seconds(now - self._offered.get(units, self._begun))
        self._offered[units] = now
        work = self._read_whole(owner, copy, nbytes, ReadPacing(now, seconds))
        name = f"collect layers {copy.first} to {copy.end}"
        self._reading[units] = self._tasks.spawn(work, name)

    async def _read_whole(
        self, owner: str, copy: StageCopy, nbytes: int, pacing: ReadPacing
    ) -> None:
        try:
            await self._read(owner, copy, nbytes, pacing)
        except (PeerError, TimeoutError, RuntimeError, MemoryError) as error:
            if not isinstance(error, (PeerError, TimeoutError)) and not is_out_of_memory(error):
                raise
            reason = "not enough memory" if is_out_of_memory(error) else str(error) or "too slow"
            log.info("copy_failed", step=copy.version.step, why=reason)
            self._core.copy_failed(copy, reason)
        else:
            await failpoints.reach("replica.whole.before", device=self._mesh.self_id)
            self._core.collected(copy)

    async def _read(self, owner: str, copy: StageCopy, nbytes: int, pacing: ReadPacing) -> None:
        place = (StateKind.REPLICA, copy.first, copy.end)
        check, versions = self._store.check, self._store.copies
        if check is None or versions is None:
            raise PeerError(f"{self._mesh.name} has no part in that job")
        slot, known = versions.slot(*place) or {}, _known_copies(versions, *place)
        here = {name: t for name, (t, _) in known.items() if name in versions.unchanging}
        self._make_sure_of_memory(nbytes, {**slot, **here})
        pace = self._paced(owner, pacing)
        reading = TransferClient(self._mesh, check, known=known, slot=slot, pace=pace)
        request = TransferRequest(
            owner,
            self._job,
            version_source(copy.version),
            copy.first,
            copy.end,
            priority=Priority.REPLICA,
            range_bytes=lambda: self._rates.next_read_bytes(owner),
            reads_in_flight=1,
        )
        await reading.read_from(request)
        state = reading.state()
        lacking = versions.lacking(copy.first, copy.end, state.tensors)
        if lacking:
            raise PeerError(f"the copy lacks {', '.join(lacking[:3])}")
        versions.put(*place, copy.version, state.tensors, state.digests)

    def _make_sure_of_memory(self, nbytes: int, here: Named) -> None:
        """Where the kernel gives away more than it has, taking it would end this process."""
        needed = nbytes - sum(tensor.nbytes for tensor in here.values())
        if needed > 0 and needed > available_memory_bytes():
            raise PeerError(f"{self._mesh.name} has no {size_text(needed)} free for a copy")

    def _paced(self, owner: str, pacing: ReadPacing) -> Pace:
        begun, left_before = 0.0, 0

        async def pace(left_bytes: int) -> None:
            nonlocal begun, left_before
            if left_before > left_bytes:
                self._rates.read(owner, left_before - left_bytes, self._clock() - begun)
            await failpoints.reach("replica.read.between", device=self._mesh.self_id)
            seconds = pacing.wait_seconds(left_bytes, self._clock())
            if seconds:
                await asyncio.sleep(seconds)
            begun, left_before = self._clock(), left_bytes

        return pace


def _known_copies(versions: SnapshotStore, kind: StateKind, first: int, end: int) -> Known:
    """What is here of the same stage at another version need not come again."""
    known: dict[str, tuple[Tensor, Digest]] = {}
    for entry in versions.entries():
        here = versions.of(entry)
        place = (entry.kind, entry.first, entry.end)
        if here is not None and place == (kind, first, end):
            known |= {
                name: (tensor, here.digests[name])
                for name, tensor in here.tensors.items()
                if name in here.digests
            }
    return known
