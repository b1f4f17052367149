"""Rebuilds a lost stage on this device, from its snapshot and a replay of what was sent to it.

The stage runs as before, by the same orders with the same executor; only its streams differ: inputs
are requested step by step, results are discarded, and each update counts already.

    ask for step s + 1 ──► neighbours, holder          v            v + 1           target
    step s: forwards, backwards, "ready" ──► commit    |── step v ──|── ... ──────────|

The other side: a device replays what it had sent to the lost stage.

    rebuilding device ── log.send {step} ──► neighbours: activations, gradients of that step
                      ── feed.send {round} ─► holder: the samples, read once more
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from p2ptrain import failpoints
from p2ptrain.aio.tasks import TaskOwner, task_scope
from p2ptrain.errors import Error, PeerError
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.kinds import FEED_SEND, LOG_SEND
from p2ptrain.messages.round_orders import Commit, GenerationKey, RoundOrder, RoundReport
from p2ptrain.messages.tensors import MicroBatchSlice, ResendLogged, ResendSamples, StreamId, Value
from p2ptrain.model.stage.optimizer_spec import received
from p2ptrain.model.wire.tensor_codec import copy_into
from p2ptrain.net.message import Message
from p2ptrain.process.memory_budget import is_out_of_memory
from p2ptrain.recovery.commit import Coefficient
from p2ptrain.recovery.cores.worker_core import WorkerCore
from p2ptrain.recovery.rebuild_plan import Rebuild
from p2ptrain.recovery.state_report import StateKind
from p2ptrain.runtime.device import LocalDevice
from p2ptrain.runtime.io.tensor_router import ACTIVATIONS, GRADIENTS, TARGETS, TensorRouter
from p2ptrain.runtime.live_stage import LiveStage
from p2ptrain.runtime.stage_sender import gradients_come_back, shared_tensors
from p2ptrain.runtime.sync_executor import SyncStageExecutor
from p2ptrain.state.snapshot_store import StoredTensors
from p2ptrain.state.transfer_server import version_source
from p2ptrain.worker.hosted_stages import HostedStages, built_stage
from p2ptrain.worker.job_store import JobStore
from p2ptrain.worker.stage_io_builder import StageIoBuilder

log = get_logger(__name__)

FIRST_NUMBER = 1 << 40
"""What stands in the place of a generation's number begins here: no generation of training has such
a one, so that what comes too late for an attempt that failed is never taken for the next
generation's."""

STEPS_AHEAD = 2
"""So many steps' inputs may lie here."""

SEND_TIMEOUT_SECONDS = 120.0


class StageRebuilder:
    """Makes one stage at a time. One a job.

    Args:
        tasks: whose the work is.
        core: hears the result.
    """

    def __init__(
        self, shell: LocalDevice, store: JobStore, tasks: TaskOwner, core: WorkerCore
    ) -> None:
        self._shell = shell
        self._store = store
        self._tasks = tasks
        self._core = core
        self._task: asyncio.Task[None] | None = None

    def make(self, request: int, what: Rebuild, generation: int) -> None:
        """Begin.

        Args:
            request: names the answer.
            generation: number of the attempt, which nothing else has.
        """
        work = self._make(request, what, generation)
        self._task = self._tasks.spawn(work, f"rebuild stage {what.stage}")

    def cancel(self) -> None:
        """It is not wanted any more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _make(self, request: int, what: Rebuild, generation: int) -> None:
        try:
            hosted = self._store.hosted
            if hosted is None or hosted.assignment.key.generation != what.generation:
                raise PeerError(f"nothing of generation {what.generation} is here any more")
            with timed(log, "stage_rebuilt"):
                await _RebuildRun(what, generation, hosted, self._store, self._shell).run()
            place = {"stage": what.stage, "step": what.target.step - 1}
            await failpoints.reach("rebuild.after", device=self._shell.mesh.self_id, **place)
        except Exception as error:  # all devices go back instead
            known = isinstance(error, Error) or is_out_of_memory(error)
            log.warning("stage_not_rebuilt", why=str(error), exc_info=None if known else error)
        self._core.rebuilt(request)


def streams_key(job: str, generation: int) -> GenerationKey:
    """Of the streams of a stage that is rebuilt in the attempt of that number."""
    return GenerationKey(job, FIRST_NUMBER + generation)


class _RebuildRun:
    """See the module."""

    def __init__(
        self,
        what: Rebuild,
        generation: int,
        hosted: HostedStages,
        store: JobStore,
        shell: LocalDevice,
    ) -> None:
        self._what = what
        self._store = store
        self._shell = shell
        self._description = hosted.description
        self._old = hosted.assignment
        shared = shared_tensors(self._old, self._description)
        if any(what.stage in users for users in shared.values()):
            raise PeerError("it shares weights with other stages, and their gradients are gone")
        me = shell.mesh.self_id
        place = replace(self._old.stages[what.stage], devices=(me,), copies_to=None)
        stages = (*self._old.stages[: what.stage], place, *self._old.stages[what.stage + 1 :])
        self._key = streams_key(self._old.key.job, generation)
        self._assignment = replace(self._old, key=self._key, stages=stages)
        self._steps = hosted.log.orders(what.version.step, what.target.step)
        self._lines = StageIoBuilder(self._assignment, what.stage, self._description, shell)
        self._task = replace(self._lines.task(), keeps=False, goes_ahead=False)

    async def run(self) -> None:
        what = self._what
        try:
            source, job = version_source(what.version), self._old.key.job
            found = await self._shell.states.read(job, source, what.first, what.end)
            live = await self._shell.compute.run((0,), partial(self._stage, found))
            connected = self._lines.connect_alone(STEPS_AHEAD)
            ends = _DiscardSender(self._steps)
            versions = self._store.versions(self._description)
            compute = self._shell.compute
            executor = SyncStageExecutor(self._task, live, ends, connected, compute, versions)
            ends.executor = executor
            async with task_scope() as group:
                serving = group.create_task(executor.run())
                await self._feed(executor, ends)
                await ends.all_ready.wait()
                await executor.update.settled()
                serving.cancel()
        finally:
            self._shell.router.disconnect(self._key)
            await self._shell.compute.flush()
        made = live.on_host(live.present())
        versions.put(StateKind.FETCHED, what.first, what.end, what.target, made, {})

    def _stage(self, found: StoredTensors) -> LiveStage:
        what, spec = self._what, received(self._old.optimizer)
        place = self._assignment.stages[what.stage]
        at = self._shell.device
        at.allow_fast_math(allowed=self._old.fast_math)
        made = built_stage(self._old, self._description, place, found.own(), spec, at)
        return LiveStage(*made, what.version, what.generation)

    async def _feed(self, executor: SyncStageExecutor, ends: _DiscardSender) -> None:
        for order, _ in self._steps:
            await ends.room.acquire()
            place = {"stage": self._what.stage, "step": order.round.step}
            await failpoints.reach("rebuild.step.before", device=self._task.device, **place)
            await executor.order(order)
            await self._ask_for(order)

    async def _ask_for(self, order: RoundOrder) -> None:
        async with task_scope() as group:
            for device, flow in self._senders():
                stream = StreamId(self._key, self._what.stage, flow)
                fields = ResendLogged(stream, self._old.key.generation, order.round.step).fields()
                group.create_task(self._call(device, Message(LOG_SEND, fields)))
            for flow in self._fed():
                stream = StreamId(self._key, self._what.stage, flow)
                fields = ResendSamples(stream, order.round, self._task.weighed).fields()
                group.create_task(self._call(self._old.holder, Message(FEED_SEND, fields)))

    async def _call(self, device: str, message: Message) -> None:
        await self._shell.mesh.call(device, message, timeout_seconds=SEND_TIMEOUT_SECONDS)

    def _senders(self) -> list[tuple[str, str]]:
        stages, index = self._old.stages, self._what.stage
        before = stages[index - 1].devices if index else ()
        answers = gradients_come_back(self._old, self._description, index)
        behind = stages[index + 1].devices if answers else ()
        return [(d, ACTIVATIONS) for d in before] + [(d, GRADIENTS) for d in behind]

    def _fed(self) -> list[str]:
        flows = [] if self._what.stage else [ACTIVATIONS]
        return [*flows, TARGETS] if self._task.uses_targets else flows


class _DiscardSender:
    """Discards the results of a stage that is being rebuilt. Implements `StageSender`.

    Attributes:
        room: for one more step's inputs.
        all_ready: the last update is committed.
    """

    def __init__(self, steps: Sequence[tuple[RoundOrder, Coefficient | None]]) -> None:
        self.executor: SyncStageExecutor | None = None
        self.room = asyncio.Semaphore(STEPS_AHEAD)
        self.all_ready = asyncio.Event()
        self._left = list(reversed(steps))

    async def send_output(self, piece: MicroBatchSlice, values: Sequence[Value]) -> None:
        """Nothing is evaluated."""

    async def send_started(self, piece: MicroBatchSlice, targets: bool) -> None:
        """Inputs are asked for."""

    async def exchange_gradients(self, order: RoundOrder) -> bool:
        """Such a stage shares no weights with others."""
        return False

    async def send_norms(self, order: RoundOrder) -> None:
        """The coefficient is known."""

    async def report(self, report: RoundReport) -> None:
        """The update counts: others have made it."""
        assert self.executor is not None
        order, coefficient = self._left.pop()
        self.executor.commit(Commit(order.round.index, order.round.step, coefficient))
        self.room.release()
        if not self._left:
            self.all_ready.set()


async def send_logged(
    hosted: HostedStages | None,
    router: TensorRouter,
    mesh: Mesh,
    peer: str,
    message: Message,
) -> Message:
    """Answer `log.send`, once all is on its way.

    Raises:
        PeerError: it is not kept any more.
    """
    wanted = ResendLogged.read(message.fields)
    if hosted is None or hosted.assignment.key != wanted.key:
        raise PeerError(f"{mesh.name} has nothing of that generation any more")
    stream, wire = wanted.stream, hosted.assignment.wire
    for piece, values in hosted.log.pieces(wanted.step, stream.stage, stream.flow):
        place = {"stage": stream.stage, "step": wanted.step}
        await failpoints.reach("log.send.between", device=mesh.self_id, **place)
        # on this device nothing is packed: the stage may write to what it gets
        own = [v if v is None or peer != mesh.self_id else copy_into(None, v) for v in values]
        await router.send_values(peer, stream, piece, own, wire=wire)
    return Message(LOG_SEND)
