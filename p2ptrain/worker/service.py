"""What every device does for the jobs of others: measure, prepare, train, hand over its state.

A device works for one job at a time, see `session`. It drops the job when the holder says so or
leaves. If the holder dies, it keeps its state for the holder's next process and reports that the
job waits; after some minutes another holder's job may replace it. `job.alive` is answered
with what the device has done so far.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import islice
from time import perf_counter, process_time

from p2ptrain import failpoints
from p2ptrain.errors import PeerError, ProtocolError
from p2ptrain.events import Event, Waiting
from p2ptrain.logs import get_logger
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.interface import (
    GONE,
    MemberState,
    Mesh,
)
from p2ptrain.messages.assignment import Assignment
from p2ptrain.messages.calls import MessageRoute, read_part
from p2ptrain.messages.findings import FindingFields
from p2ptrain.messages.job_requests import (
    EnergyReply,
    FactsRequest,
    JobEnd,
    JobKept,
    ProfileAsked,
    StateRequest,
)
from p2ptrain.messages.kinds import (
    ALIVE,
    ARRIVED,
    BACKUP_PEER,
    BEGIN,
    COMMIT,
    DIAGNOSE,
    END,
    ENERGY,
    FACTS,
    FIND,
    LOG_SEND,
    MEASURE_LINKS,
    MEASURE_PROFILE,
    MEASURED,
    OVER,
    PASSED_OVER,
    PREPARE,
    ROUND,
    SETTLED,
    SNAPSHOT_OFFER,
    SPANS,
    STANDING,
    STATE_REPORT,
    VERSIONS_KEEP,
)
from p2ptrain.messages.plan_request import PassedOver
from p2ptrain.messages.requesters import Due
from p2ptrain.messages.round_orders import (
    Commit,
    DiagnoseRequest,
    EndOfRounds,
    GenerationKey,
    RoundOrder,
    RoundQuestion,
)
from p2ptrain.messages.snapshots import BackupAssignment, RetainSnapshots, SnapshotOffer
from p2ptrain.messages.spans import SpanColumns, SpansReply, SpansRequest
from p2ptrain.net.fields import SMALL, limited
from p2ptrain.net.message import Fields, Message
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.process.energy import EnergyMeter, nvidia_counter
from p2ptrain.recovery.cores.worker_port import HolderState
from p2ptrain.recovery.standstill import ProgressCounters, Standing
from p2ptrain.recovery.work_signs import WorkSign
from p2ptrain.runtime.device import LocalDevice
from p2ptrain.runtime.io.arrival_norms import ARRIVALS_LIMIT, Arrivals
from p2ptrain.runtime.io.tensor_router import TensorRouter
from p2ptrain.state.transfer_server import TransferServer
from p2ptrain.worker.device_profile import DeviceProfiler
from p2ptrain.worker.generation_builder import WorkerContext
from p2ptrain.worker.job_slot import JobSlot
from p2ptrain.worker.rebuild import send_logged

log = get_logger(__name__)


class WorkerService:
    """One a device, from the start to the end of its membership.

    Attributes:
        slot: the job that this device works for.
        measures: what this device is asked about itself.
        device: what it shares with the jobs that this device holds.
    """

    def __init__(
        self,
        mesh: Mesh,
        compute: ComputeThread,
        measures: DeviceProfiler,
        emit: Callable[[Event], None] | None = None,
        only_for: Collection[str] = (),
        jobs: StateFolder | None = None,
    ) -> None:
        """Serve a device's part.

        Args:
            only_for: as `Due`.
            emit: called when a job here stands still.
            jobs: as `JobSlot`.
        """
        self.mesh = mesh
        self.compute = compute
        self.slot = JobSlot(mesh, jobs)
        self.measures = measures
        self.device = LocalDevice(
            mesh,
            TensorRouter(mesh),
            compute,
            TransferServer(mesh),
            measures.known,
            measures.memory.whole_budgets,
            _meter(compute),
        )
        self._emit = emit
        self.due = Due(mesh, only_for, lambda: self.slot.holder)
        self._surroundings = WorkerContext(
            shell=self.device,
            measures=self.measures,
            waits=self._report_waiting,
            changed=self.slot.on_change,
        )
        mesh.route_now(COMMIT, self._commit)  # the next round waits for it
        mesh.route_now(SNAPSHOT_OFFER, self._offered)
        mesh.route_now(BACKUP_PEER, self._backup_peer)
        mesh.route_now(VERSIONS_KEEP, self._keep)  # before a round that asks for the next copy

    @property
    def routes(self) -> Mapping[str, MessageRoute]:
        """What this device answers, by kind."""
        return {
            MEASURE_PROFILE: MessageRoute(self._measure_profile),
            MEASURED: MessageRoute(self.measures.all_measured),
            MEASURE_LINKS: MessageRoute(self._measure_links),
            STATE_REPORT: MessageRoute(self._state_report),
            FACTS: MessageRoute(self._facts),
            PREPARE: MessageRoute(self._prepare, limited(SMALL.most_bytes, 2, self._in_charge)),
            BEGIN: MessageRoute(self._begin),
            ROUND: MessageRoute(self._round),
            DIAGNOSE: MessageRoute(self._diagnose),
            ARRIVED: MessageRoute(self._arrived),
            STANDING: MessageRoute(self._standing),
            SPANS: MessageRoute(self._spans),
            ENERGY: MessageRoute(self._energy),
            FIND: MessageRoute(self._find),
            ALIVE: MessageRoute(self._alive),
            SETTLED: MessageRoute(self._settled),
            LOG_SEND: MessageRoute(self._send_logged),
            PASSED_OVER: MessageRoute(self._passed_over),
            END: MessageRoute(self._end),
            OVER: MessageRoute(self.slot.say_whether_over),
        }

    async def close(self) -> None:
        """Drop any job and stop serving."""
        await self.measures.close()
        await self.slot.close()

    # -- routes ----------------------------------------------------------------------------------

    async def _measure_profile(self, peer: str, message: Message) -> Message:
        asked = ProfileAsked.read(message.fields)
        if peer != asked.holder:
            raise ProtocolError("a device asks in the name of another")
        self.due.check_job_of(peer)
        await self.slot.make_way(asked.job)
        with self.due.measuring(peer):
            return await self.measures.measure_profile(message)

    async def _measure_links(self, peer: str, message: Message) -> Message:
        self.due.check_job_of(peer)
        with self.due.measuring(peer):
            return await self.measures.measure_links(peer, message)

    async def _state_report(self, peer: str, message: Message) -> Message:
        """Stop working on a job, and say what is here of it."""
        asked = StateRequest.read(message.fields)
        self.due.check_job_of(peer)
        await self.slot.make_way(asked.job)
        part = self.slot.take(asked.job, self._surroundings)
        reply = await part.report_state(peer, asked)
        holder = self.mesh.members.get(part.holder or "")
        if holder is not None and holder.state in GONE:
            part.holder_is(HolderState.GONE)  # it ended before this device knew its job
        return reply

    async def _find(self, peer: str, message: Message) -> Message:
        """What is kept here of a job of the device that asks: it has been started again.

        It may refuse to go on, or end before it does: that it asks ends no wait for it.
        """
        part = self.slot.part
        if part is None or part.holder != peer or part.newest is None:
            return Message(FIND)
        return Message(FIND, JobKept(part.job, part.core.generation, part.newest).fields())

    async def _facts(self, peer: str, message: Message) -> Message:
        """What this device has measured and offers, while its work continues."""
        asked = FactsRequest.read(message.fields)
        self.due.check_job_of(peer)
        if self.slot.job not in (None, asked.job):
            raise PeerError(f"{self.mesh.name} computes for another training")
        known = self.measures.facts(asked.digest)
        return Message(FACTS, {}, (known.to_part(),))

    async def _prepare(self, peer: str, message: Message) -> Message:
        """Take a part in a generation: fetch the weights, build the stages, be ready."""
        self.due.check_in_charge(peer)
        assignment = await read_part(Assignment, message)
        part = self.slot.part
        if part is None or part.job != assignment.key.job:
            raise PeerError(f"{self.mesh.name} was not asked what it has of that job")
        return await part.prepare(peer, assignment, message)

    def _in_charge(self, peer: str, _fields: Fields) -> None:
        self.due.check_in_charge(peer)

    async def _begin(self, peer: str, message: Message) -> None:
        key = GenerationKey.read(message.fields)
        part = self.slot.part_in(key.job, peer, message)
        if part is not None:
            part.begin(peer, key.generation)

    async def _round(self, peer: str, message: Message) -> None:
        key = GenerationKey.read(message.fields)
        part = self.slot.part_in(key.job, peer, message)
        if part is not None:
            last = EndOfRounds.among(message.fields)
            if last is None:
                await part.order(peer, key, RoundOrder.read(message.fields))
            elif (hosted := self.slot.engaged(peer, message)) is not None:
                hosted.no_more(last.rounds)

    def _commit(self, peer: str, message: Message) -> None:
        key = GenerationKey.read(message.fields)
        part = self.slot.part_in(key.job, peer, message)
        if part is not None:
            said = Commit.read(message.fields)
            part.core.commit(peer, key.generation, said.step, said.coefficient)

    def _offered(self, peer: str, message: Message) -> None:
        offer = SnapshotOffer.read(message.fields)
        if self.slot.part is not None and self.slot.part.job == offer.job:
            self.slot.part.replication.offered(peer, offer)

    def _backup_peer(self, peer: str, message: Message) -> None:
        said = BackupAssignment.read(message.fields)
        part = self.slot.part_in(said.job, peer, message)
        if part is not None:
            part.core.keeper_assigned(peer, said.copy, said.backup_peer)

    def _keep(self, peer: str, message: Message) -> None:
        keep = RetainSnapshots.read(message.fields)
        part = self.slot.part_in(keep.job, peer, message)
        if part is not None:
            part.keep(peer, keep.versions)

    async def _settled(self, peer: str, message: Message) -> Message:
        """Answered once the last update committed to this device is made."""
        hosted = self.slot.standing(peer, message)
        await failpoints.reach("settled.receive.before", device=self.mesh.self_id)
        await hosted.applied()
        await failpoints.reach("settled.answer.before", device=self.mesh.self_id)
        return Message(SETTLED)

    async def _send_logged(self, peer: str, message: Message) -> Message:
        """Once more what was sent to a stage that is lost."""
        return await send_logged(self.slot.hosted, self.device.router, self.mesh, peer, message)

    async def _diagnose(self, peer: str, message: Message) -> Message:
        """Where a piece that a stage here still holds first stopped being finite."""
        hosted = self.slot.standing(peer, message)
        asked = DiagnoseRequest.read(message.fields)
        executor = hosted.executors.get(asked.stage)
        if executor is None:
            raise ProtocolError(f"this device has no part in stage {asked.stage}")
        run = partial(executor.live.stage.first_non_finite, asked.held_as)
        found = await self.compute.run((0, asked.stage), run)
        return Message(DIAGNOSE, FindingFields.of(found).fields())

    async def _arrived(self, peer: str, message: Message) -> Message:
        """What came into the stages here in a round, and how large it was."""
        hosted = self.slot.standing(peer, message)
        key, asked = hosted.assignment.key, RoundQuestion.read(message.fields)
        noted = Arrivals(
            tuple(islice(self.device.router.arrived(key, asked.round), ARRIVALS_LIMIT))
        )
        return Message(ARRIVED, {}, (noted.to_part(),))

    async def _standing(self, peer: str, message: Message) -> Message:
        """What the stages here wait for, and what this device has done so far."""
        hosted = self.slot.standing(peer, message)
        members = self.mesh.members.values()
        executors = hosted.executors
        standing = Standing(
            tuple(self.device.router.waits(hosted.assignment.key)),
            tuple((index, executor.round) for index, executor in executors.items()),
            self.compute.is_busy or any(one.waits_for_group for one in executors.values()),
            frozenset(m.id for m in members if m.state is not MemberState.ALIVE),
        )
        done = count_progress(self.mesh, self.compute.finished).fields()
        return Message(STANDING, done, (standing.to_part(),))

    async def _spans(self, peer: str, message: Message) -> Message:
        """What this device has done when, for the holder of the job here."""
        asked = SpansRequest.read(message.fields)
        self._check_holder(peer)
        spans = self.device.router.spans
        parts = (SpanColumns.of(spans.take(asked.most)).to_part(),) if asked.most else ()
        return Message(SPANS, SpansReply(perf_counter(), spans.dropped).fields(), parts)

    async def _energy(self, peer: str, message: Message) -> Message:
        """What this device has used of energy, for the holder of the job here."""
        self._check_holder(peer)
        found = self.device.energy.read()
        return Message(ENERGY, EnergyReply(found.joules, found.sources, found.why).fields())

    def _check_holder(self, peer: str) -> None:
        """Raises PeerError: it does not hold the job here."""
        part = self.slot.part
        if part is None or part.holder != peer:
            raise PeerError(f"{self.mesh.name} has no part in that device's training")

    async def _alive(self, peer: str, message: Message) -> Message:
        """What this device has done so far: two answers show whether it moves."""
        part = self.slot.part
        works = self.compute.is_busy or self.due.is_working
        sign = WorkSign(
            self.compute.finished,
            0 if part is None else part.fetched_bytes,
            works or (part is not None and part.works),
        )
        return Message(ALIVE, sign.fields())

    async def _end(self, peer: str, message: Message) -> None:
        end = JobEnd.read(message.fields)
        part = self.slot.part_in(end.job, peer, message)
        if part is None:
            return
        log.info("job_ended", job=end.job, reason=end.reason)
        part.holder_is(HolderState.ENDED)

    async def _passed_over(self, peer: str, message: Message) -> None:
        """The holder of the job here has asked a coordinator in vain."""
        said = PassedOver.read(message.fields)
        part = self.slot.part
        if part is not None and part.job == said.job and peer == part.holder and part.is_busy:
            self.mesh.distrust(said.device, said.seconds)

    # -- helpers ---------------------------------------------------------------------------------

    def _report_waiting(self, holder: str) -> None:
        if self._emit is not None:
            self._emit(Waiting(self.slot.name(holder)))


def count_progress(mesh: Mesh, tasks: int) -> ProgressCounters:
    """What this device has done so far."""
    links = [mesh.link_statistics(peer) for peer in mesh.connected]
    moved = sum(link.sent_bytes + link.received_bytes for link in links if link is not None)
    return ProgressCounters(tasks, moved, process_time())


def _meter(compute: ComputeThread) -> EnergyMeter:
    card = compute.device.nvidia_id
    return EnergyMeter() if card is None else EnergyMeter(card=nvidia_counter(card))
