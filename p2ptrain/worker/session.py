"""This device's part in one job across generations: the shell of `recovery.cores.worker_core`.

    holder   generation.inventory -> stop, report state      generation.prepare -> fetch, build
             generation.begin -> the prepared stages run     train.round, train.commit

Slow work runs in tasks of this object, which report to the rules how it went.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from time import monotonic

from p2ptrain import failpoints
from p2ptrain.aio.tasks import TaskOwner
from p2ptrain.errors import InternalError, ProtocolError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.waiting import wait_until_linked
from p2ptrain.messages.assign import Fetches, placement_of
from p2ptrain.messages.assignment import Assignment
from p2ptrain.messages.calls import PendingReplies, read_part
from p2ptrain.messages.job_requests import PrepareReply, PrepareRequest, StateRequest
from p2ptrain.messages.kinds import INVENTORY, PREPARE
from p2ptrain.messages.requesters import Booking
from p2ptrain.messages.round_orders import Commit, GenerationKey, RoundOrder
from p2ptrain.messages.stage_reports import FailureReport
from p2ptrain.net.message import Message
from p2ptrain.process.allocator import trim_heap
from p2ptrain.recovery.cores import worker_events, worker_instructions
from p2ptrain.recovery.cores.worker_core import WorkerCore, WorkerPhase
from p2ptrain.recovery.state_report import StateReport
from p2ptrain.recovery.version import Version
from p2ptrain.worker.context import WorkerContext
from p2ptrain.worker.generation_builder import GenerationBuild
from p2ptrain.worker.hosted_stages import HostedStages
from p2ptrain.worker.job_store import JobStore
from p2ptrain.worker.rebuild import StageRebuilder
from p2ptrain.worker.snapshot_service import SnapshotService

log = get_logger(__name__)


class WorkerSession:
    """See the module. Create it in a running event loop; `close` it.

    Attributes:
        job: its id.
        holder: id of the device with the data.
        replication: copies of its stages, and those it keeps.
        alone_since: when the holder's process ended, by `time.monotonic`; None while nothing says
            that it has, and as soon as another one resumes the job.
    """

    def __init__(self, job: str, around: WorkerContext) -> None:
        self.job = job
        self.holder: str | None = None
        self.alone_since: float | None = None
        self._around = around
        self._booking = Booking(monotonic())
        self._store = JobStore(job, around.states, around.mesh.name, self._look)
        self.replication = SnapshotService(around.mesh, job, self._store, self._feed)
        self._core = WorkerCore(around.mesh.self_id)
        self._digest = ""
        self._others: frozenset[str] = frozenset()  # seen alive by the holder
        self._committed: Version | None = None  # newest committed to this device
        self._answers = PendingReplies()
        self._todo: deque[worker_instructions.DeviceInstruction] = deque()
        self._is_queued = False  # whether the order that is taken in counts
        self._carrying_out = False
        self._tasks = TaskOwner(self._on_failed)
        self._rebuilder = StageRebuilder(around.shell, self._store, self._tasks, self._feed)
        self._asked: GenerationBuild | None = None  # the rules say whether it is obeyed
        self._making: GenerationBuild | None = None  # under way, or done
        self._given_up: Assignment | None = None  # the last one made ready in vain

    @property
    def engagement(self) -> HostedStages | None:
        """The stages of the generation that runs here or, stopped, ran last."""
        return self._store.engagement

    @property
    def is_busy(self) -> bool:
        """Whether this device does something, or keeps something, for the job."""
        return self._core.phase is not WorkerPhase.IDLE or self.engagement is not None

    @property
    def is_over(self) -> bool:
        """Whether this device has no part in the job any more, though it may still be stopping."""
        return self._core.phase is WorkerPhase.IDLE

    def has_expired(self, now: float) -> bool:
        """Whether nothing came of what this device was asked to stand ready for."""
        return self._booking.has_expired(
            now, is_preparing=self._core.phase is WorkerPhase.PREPARING
        )

    @property
    def newest(self) -> Version | None:
        """Of what is kept here, what was computed last."""
        versions = [holding.version for holding in self._core.holdings]
        return max(versions, key=lambda version: version.age, default=None)

    @property
    def generation(self) -> int:
        """Of the newest command that was obeyed."""
        return self._core.generation

    @property
    def refused(self) -> int:
        """Stale commands so far."""
        return self._core.refused

    # -- the holder's ----------------------------------------------------------------------------

    async def report_state(self, peer: str, request: StateRequest) -> Message:
        """Stop, and say what is here. Raises PeerError: this is not obeyed."""
        await self._reach("inventory.receive.before")
        others = request.alive
        if self._core.phase is WorkerPhase.IDLE:  # nothing runs that must be stopped first
            await wait_until_linked(self._around.mesh, others)
        number, me = self._answers.number(), self._around.mesh.self_id
        asked = worker_events.StateReportAsked(
            request=number,
            peer=peer,
            generation=request.generation,
            apply=request.apply,
            coefficient=request.coefficient,
            rebuild=request.rebuild,
        )
        if request.rebuild is not None and request.rebuild.device != me:
            raise ProtocolError("a rebuild is asked of another device")
        if self._core.refusal(peer, asked.generation) is None:  # nothing else of it is believed
            self._digest, self._others, self.holder = request.digest, others, peer
            self._booking.asked(monotonic())
        answer = await self._answer(asked)
        await self._reach("inventory.answer.before")
        return answer

    async def prepare(self, peer: str, assignment: Assignment, message: Message) -> Message:
        """Fetch and build what the message's `assignment` gives this device.

        Raises as `report_state`.
        """
        await self._reach("prepare.receive.before")
        if self._around.mesh.self_id not in assignment.devices:
            raise ProtocolError("an assignment without this device")
        fetches = (await read_part(Fetches, message, 1)).parts
        number = self._answers.number()
        placed = placement_of(assignment)
        request = PrepareRequest.read(message.fields)
        asked = worker_events.PrepareAsked(number, peer, placed, fetches)
        self._asked = GenerationBuild(
            *(assignment, self._around, self._store, self._tasks, self._feed, self._look),
            request.needed,
            gathers=request.gather,
        )
        answer = await self._answer(asked)
        self._booking.asked(monotonic())
        await self._reach("ready.send.before")
        return answer

    async def _answer(self, asked: worker_events.HolderAsks) -> Message:
        with self._answers.open(asked.request) as answer:
            self._feed(asked)
            return await answer

    def begin(self, peer: str, generation: int) -> None:
        """A generation is in force."""
        failpoints.reach_now("begin.receive.before", device=self._around.mesh.self_id)
        self._feed(worker_events.BeginReceived(peer, generation))

    async def order(self, peer: str, key: GenerationKey, order: RoundOrder) -> None:
        """A round of a generation."""
        self._is_queued = False
        heard = (peer, key.generation, order.round.step, order.keep, order.stay, order.offer)
        self._feed(worker_events.RoundOrdered(*heard))
        engagement = self.engagement
        if self._is_queued and engagement is not None:
            if order.keep and engagement.keeps:
                self._store.offer(Version(order.round.step + 1, key.generation))
            await engagement.order(order)

    def keep(self, peer: str, versions: tuple[Version, ...]) -> None:
        """The holder names the versions that stay: the stable one, then those that are read."""
        self.replication.keep(peer, versions)
        engagement = self.engagement
        if engagement is not None and versions and peer == self.holder:
            # a backup peer rebuilds a lost stage from the stable one, however new the others are
            engagement.log.forget_before(versions[0].step)

    def commit(self, peer: str, key: GenerationKey, commit: Commit) -> None:
        """An update counts."""
        self._report_progress()
        self._feed(
            worker_events.CommitReceived(peer, key.generation, commit.step, commit.coefficient)
        )

    def holder_is(self, state: worker_events.HolderState) -> None:
        """What became of the holder, or of its job."""
        if state is worker_events.HolderState.GONE and self.alone_since is None:
            self.alone_since = monotonic()
        self._feed(worker_events.HolderChanged(state))

    def link_ended(self, peer: str) -> None:
        """What was queued on the link to `peer` is lost."""
        self._feed(worker_events.LinkEnded(peer))

    def link_started(self, peer: str) -> None:
        """There is a link to `peer`, perhaps again."""
        self._feed(worker_events.LinkStarted(peer))

    async def close(self) -> None:
        """Leave the job at once."""
        self.holder_is(worker_events.HolderState.ENDED)
        await self.replication.stop()
        await self._tasks.done()

    async def _reach(self, name: str) -> None:
        await failpoints.reach(name, device=self._around.mesh.self_id)

    # -- the rules -------------------------------------------------------------------------------

    def _feed(self, event: worker_events.DeviceEvent) -> None:
        self._todo.extend(self._core.handle(event))
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while self._todo:
                self._carry_out(self._todo.popleft())
        finally:
            self._carrying_out = False
        self._around.changed()

    def _carry_out(self, instruction: worker_instructions.DeviceInstruction) -> None:
        match instruction:
            case worker_instructions.AnswerStateReport():
                self._send_inventory(instruction)
            case worker_instructions.AnswerReady():
                self._send_ready(instruction)
            case worker_instructions.RefuseCommand(request, _, reason):
                self._answers.refuse(request, reason)
            case worker_instructions.StopStages(generation):
                self._tasks.spawn(self._stop(), f"stop generation {generation}")
            case worker_instructions.RebuildStage(request, what):
                self._rebuilder.make(request, what, self._core.generation)
            case worker_instructions.CancelRebuild():
                self._rebuilder.cancel()
            case worker_instructions.FetchParts(_, _, fetches):
                assert self._asked is not None
                self._making = self._asked
                self._making.fetch(fetches)
            case worker_instructions.BuildStages():
                assert self._making is not None
                self._making.build()
            case worker_instructions.CancelPrepare():
                self._give_up("is made ready for another plan")
            case worker_instructions.StartStages():
                self._start()
            case worker_instructions.QueueRound():
                self._is_queued = True
            case worker_instructions.ApplyUpdate():
                self._apply(instruction)
            case worker_instructions.DropState(holdings):
                self._store.drop(holdings)
            case worker_instructions.ReportLink(_, generation, peer, back):
                self._report_link(generation, peer, back=back)
            case worker_instructions.ReportOrphaned(holder):
                log.info("holder_gone", job=self.job)
                self._around.waits(holder)
            case worker_instructions.ReleaseJob():
                self._release()
            case worker_instructions.CopyInstruction():
                self.replication.carry_out(instruction)
            case _:
                raise InternalError(f"no shell carries out {type(instruction).__name__}")

    @staticmethod
    def _on_failed(work: str, error: BaseException) -> None:
        log.error("not_done", work=work, exc_info=error)

    # -- taking stock ----------------------------------------------------------------------------

    async def _stop(self) -> None:
        """No task of the old generation is left, in no thread, when the rules receive it."""
        await self.replication.stop()
        held = await self._store.rest()
        self._store.keep(self._core.holdings)
        self._feed(worker_events.GenerationStopped(held))

    def _look(self, version: Version) -> None:
        """Something of that version does not fit its digests: what it is must not be counted on."""

        async def look() -> None:
            for holding in await self._store.look(version):
                self._feed(worker_events.SnapshotDamaged(holding))

        self._tasks.spawn(look(), f"look through version {version.step}")

    def _send_inventory(self, answer: worker_instructions.AnswerStateReport) -> None:
        self.alone_since = None  # this is asked for a holder that resumes
        mesh = self._around.mesh
        inventory = StateReport(
            mesh.self_id,
            answer.generation,
            answer.holdings,
            linked=self._others & mesh.connected,
            logged=None if self.engagement is None else self.engagement.logged,
        )
        whole = self._around.measures.complete(inventory, self._digest)
        blob = memoryview(whole.to_bytes())
        self._answers.give(answer.request, Message(INVENTORY, {}, (blob,)))

    def _apply(self, what: worker_instructions.ApplyUpdate) -> None:
        self._committed = what.version
        engagement = self.engagement
        assert engagement is not None
        engagement.log.counts(what.version.step - 1, what.coefficient)
        if self._core.phase is WorkerPhase.RUNNING:
            engagement.commit(Commit(0, what.version.step - 1, what.coefficient))
        else:
            self._tasks.spawn(self._catch_up(engagement, what), f"apply {what.version.step}")

    async def _catch_up(
        self, engagement: HostedStages, what: worker_instructions.ApplyUpdate
    ) -> None:
        """An update that counts elsewhere already; nothing else of the stages runs."""
        outcome = await engagement.apply_ready(what.version, what.coefficient)
        for first, error in outcome.items():
            if error is not None:
                log.warning("update_failed", step=what.version.step, why=str(error))
                self._feed(worker_events.UpdateTorn(what.generation, first))
            else:
                self._store.offer(what.version)
                self._feed(
                    worker_events.Applied(what.generation, first, what.version, what.coefficient)
                )

    def _report_progress(self) -> None:
        """What the stages have done since, before the rules decide by it."""
        engagement = self.engagement
        if engagement is None or self._core.phase is not WorkerPhase.RUNNING:
            return
        for index, runner in engagement.runners.items():
            first, live = engagement.assignment.stages[index].first, runner.live
            generation = engagement.assignment.key.generation
            if live.version.computed == generation:
                self._feed(worker_events.Applied(generation, first, live.version, live.coefficient))
            if live.ready is not None and live.ready != self._committed:
                self._feed(worker_events.GradientsReady(generation, first, live.ready.step - 1))

    @property
    def works(self) -> bool:
        """Whether something is being done that the holder may wait for."""
        return not self._tasks.is_idle

    @property
    def fetched_bytes(self) -> int:
        """What came for the generation that is made ready here, as it comes."""
        return 0 if self._making is None else self._making.fetched_bytes

    def _send_ready(self, answer: worker_instructions.AnswerReady) -> None:
        trouble = answer.trouble
        moved_bytes = 0 if self._making is None else self._making.moved_bytes
        if trouble is None:
            ready = PrepareReply(True, moved_bytes)
            self._answers.give(answer.request, Message(PREPARE, ready.fields()))
            return
        self._give_up("could not be made ready")
        reply = PrepareReply(False, moved_bytes, trouble.reason, trouble.source, trouble.short)
        self._answers.give(answer.request, Message(PREPARE, reply.fields()))

    def _give_up(self, why: str) -> None:
        """What is made ready, or stands."""
        if self._making is not None:
            self._making.give_up(why)
            self._given_up, self._making = self._making.assignment, None

    # -- running ---------------------------------------------------------------------------------

    def _start(self) -> None:
        assert self._making is not None
        engagement = self._making.take()
        self._making = None
        self._booking.begun()
        self.alone_since = None
        self._store.train(engagement)
        self.replication.begin(engagement)
        self._committed = None
        engagement.start(partial(self._around.on_failure, engagement.assignment))
        trim_heap()  # and with the old generation what only it had

    def _report_link(self, generation: int, peer: str, *, back: bool) -> None:
        engagement = self.engagement
        known = (self._given_up, None if engagement is None else engagement.assignment)
        for assignment in known:
            if assignment is not None and assignment.key.generation == generation:
                message = "a link is back" if back else "a link ended"
                report = FailureReport("link", message, peer=peer, back=back)
                self._tasks.spawn(self._around.notify_holder(assignment, report), "report a link")

    def _release(self) -> None:
        self._give_up("has left the job")
        self._rebuilder.cancel()
        self._store.release()
        self._answers.refuse_all("the job has ended")
        self._tasks.spawn(self._end(), "end the job")

    async def _end(self) -> None:
        await self.replication.stop()
        await self._store.end()
        trim_heap()
        self._around.changed()
