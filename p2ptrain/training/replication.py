"""Copies of stages: this device's own, offered to who keeps them, and those it keeps for others.

    update ──► copy (compute thread) ──► checksums (a thread beside) ──► kept ──► offer ──► keeper
                                                          keeper: whole, or why not ──► holder

The shell of `recovery.device_core` for all that has to do with copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from p2ptrain import failpoints
from p2ptrain.errors import PeerError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh
from p2ptrain.net.message import Message
from p2ptrain.training.background import in_background
from p2ptrain.training.collecting import Collecting
from p2ptrain.training.digests import digests_of
from p2ptrain.training.engagement import Engagement
from p2ptrain.training.job_store import JobStore
from p2ptrain.training.owned_tasks import OwnedTasks
from p2ptrain.training.protocol import (
    REPLICA_KEPT,
    REPLICA_OFFER,
    EpochKey,
    ReplicaKeeper,
    ReplicaKept,
    ReplicaOffer,
)
from p2ptrain.training.recovery import device_events as rules
from p2ptrain.training.recovery import device_instructions as to_do
from p2ptrain.training.recovery.holdings import Holding, Kind
from p2ptrain.training.recovery.version import Version

log = get_logger(__name__)

CopyInstruction = to_do.Copy | to_do.Offer | to_do.Collect | to_do.TellReplica


class Replication:
    """See the module. One a job; `stop` before an epoch ends."""

    def __init__(
        self, mesh: Mesh, job: str, store: JobStore, tell: Callable[[rules.DeviceEvent], None]
    ) -> None:
        """Nothing is copied yet; `tell` hears what has become of each copy."""
        self._mesh = mesh
        self._job = job
        self._store = store
        self._tell = tell
        self._collecting = Collecting(mesh, job, store, tell)
        self._offered_bytes = 0  # of the offer that is being heard
        self._tasks = OwnedTasks(self._on_failed)

    def begin(self, engagement: Engagement) -> None:
        """These are the stages from now on."""
        self._collecting.begin()
        for runner in engagement.runners.values():
            runner.update.on_kept = partial(self._copied, engagement)

    def offered(self, peer: str, epoch: int, offer: ReplicaOffer) -> None:
        """`peer` has a copy to be kept here."""
        self._offered_bytes = offer.nbytes
        self._tell(rules.OfferHeard(peer, epoch, offer.first, offer.end, offer.version))

    def keeper_is(self, peer: str, epoch: int, keeper: ReplicaKeeper) -> None:
        """Copies of a stage here go to another device from now on."""
        place = (keeper.first, keeper.end, keeper.version)
        self._tell(rules.KeeperIs(peer, epoch, *place, keeper.keeper))

    def keep(self, peer: str, versions: tuple[Version, ...]) -> None:
        """Older versions than these may go."""
        self._tell(rules.KeepHeard(peer, versions))

    def carry_out(self, instruction: CopyInstruction) -> None:
        """What the rules say must be done."""
        match instruction:
            case to_do.Copy():
                self._tasks.spawn(self._copy(), "copy the stages")
            case to_do.Offer():
                self._tasks.spawn(self._offer(instruction), "offer a copy")
            case to_do.Collect():
                self._collecting.collect(instruction, self._offered_bytes)
            case to_do.TellReplica():
                self._tasks.spawn(self._tell_holder(instruction), "tell of a copy")

    async def stop(self) -> None:
        """Copy, offer and collect nothing any more. May be called again."""
        await self._collecting.stop()
        await self._tasks.cancel()

    @staticmethod
    def _on_failed(work: str, error: BaseException) -> None:
        log.error("not_replicated", work=work, exc_info=error)

    # -- own stages ------------------------------------------------------------------------------

    async def _copy(self) -> None:
        engagement = self._store.engagement
        if engagement is not None:
            await engagement.copy()

    def _copied(
        self, engagement: Engagement, stage: int, version: Version, why_not: str | None
    ) -> None:
        place, epoch = engagement.assignment.stages[stage], engagement.assignment.key.epoch
        if why_not is not None:
            log.warning("no_copy", stage=stage, step=version.step, why=why_not)
            self._tell(rules.CopyFailed(epoch, place.first, place.end, version, why_not))
            return
        holding = Holding(place.first, place.end, version, Kind.KEPT)
        self._tasks.spawn(self._seal(engagement, stage, holding), f"checksums of stage {stage}")

    async def _seal(self, engagement: Engagement, stage: int, holding: Holding) -> None:
        """Take the copy's checksums, beside the computing, and let others read it."""
        if failpoints.armed:
            place = {"stage": stage, "step": holding.version.step - 1}
            await failpoints.reach("replica.copied", device=self._mesh.self_id, **place)
        copy = engagement.store.of(holding)
        if copy is None:
            return
        digests = await in_background(partial(digests_of, copy.tensors))
        if engagement.store.seal(holding, copy, digests):
            self._store.offer(holding.version)
            self._tell(rules.Kept(holding.first, holding.end, holding.version))

    # -- messages --------------------------------------------------------------------------------

    async def _offer(self, what: to_do.Offer) -> None:
        try:
            found = await self._store.find(what.version, what.first, what.end)
        except PeerError as error:  # dropped since: there is a newer one
            log.info("copy_not_offered", step=what.version.step, why=str(error))
            return
        nbytes = sum(tensor.nbytes for tensor in found.tensors.values())
        offer = ReplicaOffer(what.version, what.first, what.end, nbytes)
        await self._send(what.keeper, REPLICA_OFFER, what.epoch, offer.fields())
        if failpoints.armed:
            await failpoints.reach("replica.offer.after", device=self._mesh.self_id)

    async def _tell_holder(self, what: to_do.TellReplica) -> None:
        if failpoints.armed:
            await failpoints.reach("replica.kept.before", device=self._mesh.self_id)
        kept = ReplicaKept(what.version, what.first, what.end, what.failed)
        await self._send(what.holder, REPLICA_KEPT, what.epoch, kept.fields())
        if failpoints.armed:
            await failpoints.reach("replica.kept.after", device=self._mesh.self_id)

    async def _send(self, peer: str, kind: str, epoch: int, fields: dict[str, Any]) -> None:
        try:
            key = EpochKey(self._job, epoch)
            await self._mesh.send(peer, Message(kind, {**key.fields(), **fields}))
        except PeerError as error:
            # The end of the link ends the epoch; the next one copies anew.
            log.info("not_told_of_copy", kind=kind, peer=peer[:12], why=str(error))
