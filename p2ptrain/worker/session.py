"""This device's part in one job across generations: the port of `recovery.cores.worker_core`.

    holder   generation.report -> stop, report state      generation.prepare -> fetch, build
             generation.begin -> the prepared stages run     train.round, train.commit

Slow work runs in tasks of this object, which report to the rules how it went.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import traceback
from collections.abc import Callable
from functools import partial
from time import monotonic

from p2ptrain import failpoints
from p2ptrain.aio.tasks import TaskOwner
from p2ptrain.errors import AcceleratorFailed, Error, PeerError, ProtocolError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.waiting import wait_until_linked
from p2ptrain.messages.assign import Fetches
from p2ptrain.messages.assignment import Assignment
from p2ptrain.messages.calls import read_part
from p2ptrain.messages.job_requests import PrepareReply, PrepareRequest, StateRequest
from p2ptrain.messages.kinds import FAILED, PREPARE, STATE_REPORT
from p2ptrain.messages.requesters import Booking
from p2ptrain.messages.round_orders import (
    Commit,
    FailureReport,
    GenerationKey,
    RoundOrder,
    StageKey,
)
from p2ptrain.net.message import Message
from p2ptrain.process.host_process import trim_heap
from p2ptrain.process.memory_budget import is_of_host, is_out_of_memory
from p2ptrain.recovery.commit import Coefficient
from p2ptrain.recovery.cores.worker_core import WorkerCore
from p2ptrain.recovery.cores.worker_port import HolderState, StateReportAsked, WorkerPhase
from p2ptrain.recovery.fetch_plan import Fetch
from p2ptrain.recovery.generation_request import PrepareFailed
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.rebuild_plan import Rebuild
from p2ptrain.recovery.state_report import StageCopy, StateEntry, StateReport
from p2ptrain.recovery.version import Version
from p2ptrain.worker.generation_builder import GenerationBuild, WorkerContext
from p2ptrain.worker.hosted_stages import HostedStages, failure_report
from p2ptrain.worker.job_store import JobStore
from p2ptrain.worker.rebuild import StageRebuilder
from p2ptrain.worker.snapshot_service import SnapshotService

log = get_logger(__name__)


class WorkerSession:
    """See the module. Create it in a running event loop; `close` it. Implements `WorkerPort`.

    Attributes:
        job: its id.
        holder: id of the device with the data.
        core: the rules.
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
        self._store = JobStore(job, around.shell.states, self._look)
        self.core = WorkerCore(around.shell.mesh.self_id, self)
        self.replication = SnapshotService(around.shell.mesh, job, self._store, self.core)
        self._digest = ""
        self._others: frozenset[str] = frozenset()  # seen alive by the holder
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Message]] = {}  # by request, those waited for
        self._tasks = TaskOwner(self._on_failed)
        self._rebuilder = StageRebuilder(around.shell, self._store, self._tasks, self.core)
        self._asked: GenerationBuild | None = None  # the rules say whether it is obeyed
        self._making: GenerationBuild | None = None  # under way, or done
        self._given_up: Assignment | None = None  # the last one made ready in vain

    @property
    def hosted(self) -> HostedStages | None:
        """The stages of the generation that runs here or, stopped, ran last."""
        return self._store.hosted

    @property
    def is_busy(self) -> bool:
        """Whether this device does something, or keeps something, for the job."""
        return self.core.phase is not WorkerPhase.IDLE or self.hosted is not None

    @property
    def is_over(self) -> bool:
        """Whether this device has no part in the job any more, though it may still be stopping."""
        return self.core.phase is WorkerPhase.IDLE

    def has_expired(self, now: float) -> bool:
        """Whether nothing came of what this device was asked to stand ready for."""
        return self._booking.has_expired(now, is_preparing=self.core.phase is WorkerPhase.PREPARING)

    @property
    def newest(self) -> Version | None:
        """Of what is kept here, what was computed last."""
        versions = [entry.version for entry in self.core.entries]
        return max(versions, key=lambda version: version.age, default=None)

    # -- the holder's ----------------------------------------------------------------------------

    async def report_state(self, peer: str, request: StateRequest) -> Message:
        """Stop, and say what is here. Raises PeerError: this is not obeyed."""
        await self._reach("state_report.receive.before")
        others = request.alive
        if self.core.phase is WorkerPhase.IDLE:  # nothing runs that must be stopped first
            await wait_until_linked(self._around.shell.mesh, others)
        number, me = next(self._numbers), self._around.shell.mesh.self_id
        asked = StateReportAsked(
            number, peer, request.generation, request.apply, request.coefficient, request.rebuild
        )
        if request.rebuild is not None and request.rebuild.device != me:
            raise ProtocolError("a rebuild is asked of another device")
        if self.core.refusal(peer, asked.generation) is None:  # nothing else of it is believed
            self._digest, self._others, self.holder = request.digest, others, peer
            self._booking.asked(monotonic())
        answer = await self._answer(number, partial(self.core.state_asked, asked))
        await self._reach("state_report.answer.before")
        return answer

    async def prepare(self, peer: str, assignment: Assignment, message: Message) -> Message:
        """Fetch and build what the message's `assignment` gives this device.

        Raises as `report_state`.
        """
        await self._reach("prepare.receive.before")
        if self._around.shell.mesh.self_id not in assignment.devices:
            raise ProtocolError("an assignment without this device")
        fetches = (await read_part(Fetches, message, 1)).parts
        request = PrepareRequest.read(message.fields)
        self._asked = GenerationBuild(
            *(assignment, self._around, self._store, self._tasks, self.core, self._look),
            request.needed,
            gathers=request.gather,
        )
        number, placed = next(self._numbers), assignment.placed
        prepare = partial(self.core.prepare_asked, number, peer, placed, fetches)
        answer = await self._answer(number, prepare)
        self._booking.asked(monotonic())
        await self._reach("ready.send.before")
        return answer

    async def _answer(self, number: int, ask: Callable[[], None]) -> Message:
        """What comes of a request; raises PeerError where it is refused."""
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            ask()
            return await answer
        finally:
            del self._answers[number]

    def begin(self, peer: str, generation: int) -> None:
        """A generation is in force."""
        failpoints.reach_now("begin.receive.before", device=self._around.shell.mesh.self_id)
        self.core.begin(peer, generation)

    async def order(self, peer: str, key: GenerationKey, order: RoundOrder) -> None:
        """A round of a generation."""
        step, copies = order.round.step, {"keep": order.keep, "offer": order.offer}
        is_of_running = self.core.round_ordered(
            peer, key.generation, step, stay=order.stay, **copies
        )
        hosted = self.hosted
        if is_of_running and hosted is not None:
            await hosted.order(order)

    def keep(self, peer: str, versions: tuple[Version, ...]) -> None:
        """The holder names the versions that stay: the stable one, then those that are read."""
        self.core.retain(peer, versions)
        hosted = self.hosted
        if hosted is not None and versions and peer == self.holder:
            # a backup peer rebuilds a lost stage from the stable one, however new the others are
            hosted.log.forget_before(versions[0].step)

    def holder_is(self, state: HolderState) -> None:
        """What became of the holder, or of its job."""
        if state is HolderState.GONE and self.alone_since is None:
            self.alone_since = monotonic()
        self.core.holder_is(state)

    async def close(self) -> None:
        """Leave the job at once."""
        self.holder_is(HolderState.ENDED)
        await self.replication.stop()
        await self._tasks.done()

    async def _reach(self, name: str) -> None:
        await failpoints.reach(name, device=self._around.shell.mesh.self_id)

    @staticmethod
    def _on_failed(work: str, error: BaseException) -> None:
        log.error("not_done", work=work, exc_info=error)

    def phase_changed(self) -> None:
        """See `WorkerPort`, as of all that follow."""
        self._around.changed()

    def refuse(self, request: int, peer: str, reason: str) -> None:
        """The same holder may ask again, or another one."""
        answer = self._answers.get(request)
        if answer is not None and not answer.done():
            answer.set_exception(PeerError(reason))

    def _give(self, request: int, message: Message) -> None:
        """Nothing happens where the asker has gone."""
        answer = self._answers.get(request)
        if answer is not None and not answer.done():
            answer.set_result(message)

    # -- state reports ---------------------------------------------------------------------------

    def stop_stages(self) -> None:
        """No task of the old generation is left, in no thread, when the rules receive it."""

        async def stop() -> None:
            await self.replication.stop()
            await self._store.rest()
            self.core.stopped()

        self._tasks.spawn(stop(), "stop the stages")

    def drop_state(self, entries: tuple[StateEntry, ...]) -> None:
        """Others may not read it any more either."""
        self._store.drop(entries)

    def _look(self, version: Version) -> None:
        """Something of that version does not fit its digests: what it is must not be counted on."""

        self._tasks.spawn(self._store.look(version), f"look through version {version.step}")

    def answer_state(self, request: int, peer: str, entries: tuple[StateEntry, ...]) -> None:
        """With what this device has measured."""
        self.alone_since = None  # this is asked for a holder that resumes
        mesh = self._around.shell.mesh
        state_report = StateReport(
            mesh.self_id,
            self.core.generation,
            entries,
            linked=self._others & mesh.connected,
            logged=None if self.hosted is None else self.hosted.logged,
        )
        whole = self._around.measures.complete(state_report, self._digest)
        blob = memoryview(whole.to_bytes())
        self._give(request, Message(STATE_REPORT, {}, (blob,)))

    def rebuild_stage(self, request: int, what: Rebuild) -> None:
        """From a copy, and what others log."""
        self._rebuilder.make(request, what, self.core.generation)

    def cancel_rebuild(self) -> None:
        """The next question came."""
        self._rebuilder.cancel()

    def apply_update(
        self, generation: int, version: Version, coefficient: Coefficient | None, *, keep: bool
    ) -> None:
        """Each stage knows from its order whether it keeps a copy."""
        hosted = self.hosted
        assert hosted is not None
        hosted.log.counts(version.step - 1, coefficient)
        if self.core.phase is WorkerPhase.RUNNING:
            hosted.commit(Commit(0, version.step - 1, coefficient))
        else:
            work = self._catch_up(hosted, generation, version, coefficient)
            self._tasks.spawn(work, f"apply {version.step}")

    async def _catch_up(
        self,
        hosted: HostedStages,
        generation: int,
        version: Version,
        coefficient: Coefficient | None,
    ) -> None:
        """An update that counts elsewhere already; nothing else of the stages runs."""
        outcome = await hosted.apply_ready(version, coefficient)
        for first, error in outcome.items():
            if error is not None:
                log.warning("update_failed", step=version.step, why=str(error))
            self.core.caught_up(generation, first)

    def entries(self) -> tuple[StateEntry, ...]:
        """Also while the stages run."""
        return self._store.entries()

    # -- making ready ----------------------------------------------------------------------------

    @property
    def works(self) -> bool:
        """Whether something is being done that the holder may wait for."""
        return not self._tasks.is_idle

    @property
    def fetched_bytes(self) -> int:
        """What came for the generation that is made ready here, as it comes."""
        return 0 if self._making is None else self._making.fetched_bytes

    def make_ready(self, generation: int, version: Version, fetches: tuple[Fetch, ...]) -> None:
        """As the assignment that came with the request says, beside the stages that ran last."""
        assert self._asked is not None
        self._making = self._asked
        self._making.begin(fetches)

    def cancel_prepare(self) -> None:
        """Others wait no longer for what was to be handed on either."""
        self._give_up("is made ready for another plan")

    def answer_ready(self, request: int, peer: str, trouble: PrepareFailed | None) -> None:
        """With what came over the network."""
        moved_bytes = 0 if self._making is None else self._making.moved_bytes
        reply = PrepareReply(True, moved_bytes)
        if trouble is not None:
            self._give_up("could not be made ready")
            reply = PrepareReply(False, moved_bytes, trouble.reason, trouble.source, trouble.short)
        self._give(request, Message(PREPARE, reply.fields()))

    def _give_up(self, why: str) -> None:
        """What is made ready, or stands."""
        if self._making is not None:
            self._making.give_up(why)
            self._given_up, self._making = self._making.assignment, None

    # -- running ---------------------------------------------------------------------------------

    def start_stages(self, placed: Placement) -> None:
        """Those that were made ready."""
        assert self._making is not None
        hosted, before = self._making.take(), self.hosted
        self._making = None
        self._booking.begun()
        self.alone_since = None
        self._store.train(hosted)
        self.replication.begin(hosted)
        hosted.start(partial(self._report_failure, hosted.assignment))
        if before is not None and before.is_on_accelerator:
            del before
            gc.collect()  # stages are in rings of references, and little else of a card's is free
        trim_heap()  # and with the old generation what only it had

    def copy_stages(self, version: Version) -> None:
        """Before their first round."""
        self.replication.copy_stages()

    def offer_copy(self, peer: str, copy: StageCopy) -> None:
        """With its size."""
        self.replication.offer(peer, copy)

    def report_copy(self, holder: str, copy: StageCopy, failed: str | None) -> None:
        """A version counts once all are reported."""
        self.replication.report(holder, copy, failed)

    def report_link(self, holder: str, generation: int, peer: str, *, back: bool) -> None:
        """Of what stands, or has been given up; not to a holder whose end it may be about."""
        hosted, mesh = self.hosted, self._around.shell.mesh
        known = (self._given_up, None if hosted is None else hosted.assignment)
        for assignment in known if holder in {mesh.self_id, *mesh.connected} else ():
            if assignment is not None and assignment.key.generation == generation:
                message = "a link is back" if back else "a link ended"
                report = FailureReport("link", message, peer=peer, back=back)
                stage = assignment.stages_of(mesh.self_id)[0]
                self._tasks.spawn(self._send_failed(assignment, stage, report), "report a link")

    async def _report_failure(
        self, assignment: Assignment, stage: int, error: BaseException
    ) -> None:
        if not isinstance(error, Error):
            log.debug("stage_failed", stage=stage, trace="".join(traceback.format_exception(error)))
        if isinstance(error, AcceleratorFailed):
            self._around.shell.compute.give_up_device(error)
        if is_out_of_memory(error) and not is_of_host(error):
            error = self._around.measures.given_up(assignment.digest) or error
        report = failure_report(error, self._around.measures.memory.ran_out)
        await self._send_failed(assignment, stage, report)

    async def _send_failed(self, assignment: Assignment, stage: int, report: FailureReport) -> None:
        fields = {**StageKey(assignment.key, stage).fields(), **report.fields()}
        try:
            await self._around.shell.mesh.send(assignment.holder, Message(FAILED, fields))
        except PeerError as gone:
            log.warning("failure_not_reported", why=str(gone))

    def report_orphaned(self, holder: str) -> None:
        """To the person at this device."""
        log.info("holder_gone", job=self.job)
        self._around.waits(holder)

    def release_job(self) -> None:
        """Nothing is left once the tasks have ended."""
        self._give_up("has left the job")
        self._rebuilder.cancel()
        self._store.release()
        for request in self._answers:
            self.refuse(request, "", "the job has ended")
        self._tasks.spawn(self._end(), "end the job")

    async def _end(self) -> None:
        await self.replication.stop()
        await self._store.end()
        trim_heap()
        self._around.changed()
