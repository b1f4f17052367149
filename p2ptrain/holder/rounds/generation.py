"""The holder's side of one generation: orders rounds, feeds them and collects the results."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from p2ptrain import failpoints
from p2ptrain.aio.mailbox import Mailbox
from p2ptrain.aio.tasks import task_scope
from p2ptrain.errors import (
    Error,
    InternalError,
    NotItsPart,
    PeerError,
    ProtocolError,
    TrainingError,
    size_text,
)
from p2ptrain.holder.input.feeder import Feeder
from p2ptrain.holder.rounds.round_results import NormGatherer, RoundTracker, diagnose
from p2ptrain.job.rounds import Round, RoundMode
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import display_name
from p2ptrain.messages.assignment import Assignment
from p2ptrain.messages.calls import call_while_it_works, read_part, while_it_works
from p2ptrain.messages.findings import FindingFields, NonFiniteFinding
from p2ptrain.messages.kinds import (
    ARRIVED,
    BEGIN,
    COMMIT,
    DIAGNOSE,
    DONE,
    FAILED,
    NORMS,
    ROUND,
    SETTLED,
    STANDING,
)
from p2ptrain.messages.round_orders import (
    Commit,
    DiagnoseRequest,
    EndOfRounds,
    FailureReport,
    NormsReport,
    RoundOrder,
    RoundQuestion,
    RoundReport,
    StageKey,
)
from p2ptrain.messages.tensors import MicroBatchKey, StreamId, Value
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.stage import cross_stage_gradients
from p2ptrain.model.wire.tensor_codec import copy_into
from p2ptrain.net.fields import limited
from p2ptrain.net.message import Message
from p2ptrain.plan.types.memory_budgets import MemoryShortage
from p2ptrain.recovery.commit import Coefficient
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings
from p2ptrain.recovery.standstill import ProgressCounters, Standing
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.device import LocalDevice
from p2ptrain.runtime.io.arrival_norms import Arrivals, StageArrival
from p2ptrain.runtime.io.sample_division import SampleDivision
from p2ptrain.runtime.io.tensor_receiver import StreamContents, TensorReceiver, contents_at_cut
from p2ptrain.runtime.io.tensor_router import TensorRouter
from p2ptrain.runtime.not_finite import MicroBatchNotFinite
from p2ptrain.runtime.tiled.tile_layout import tiles_of
from p2ptrain.state.transfer_client import Known, TransferRequest, read_state
from p2ptrain.state.transfer_server import WEIGHTS, Check

log = get_logger(__name__)

DIAGNOSE_TIMEOUT_SECONDS = 30.0

SETTLE_TIMEOUT_SECONDS = 30.0

ARRIVED_TIMEOUT_SECONDS = 5.0

SHORT_BYTES = 64 << 20
"""A device with less free memory between two rounds, which has gone, may have run out of it."""


class HolderGeneration:
    """One plan in force, seen from the device that holds the data.

    Args:
        on_link: called with two devices whose link broke, or (True) is back.
        is_held_up: whether a callback of the job has not returned.
        known: tensors that need not come from a device that has the same.
        max_norm: of gradients, for which coefficients are made of the stages' norms; None = none.

    Attributes:
        evaluated_ahead: pieces of an evaluation that may be under way, or wait to be measured.
        draining: set where no further round is to be ordered.
    """

    def __init__(
        self,
        assignment: Assignment,
        description: ModelDescription,
        device: LocalDevice,
        check: Check,
        on_link: Callable[[str, str, bool], None],
        settings: RecoverySettings = HOME,
        is_held_up: Callable[[], bool] = bool,
        known: Known | None = None,
        max_norm: float | None = None,
    ) -> None:
        self.assignment = assignment
        self._known = known
        self._settings = settings
        self.evaluated_ahead = 2 * len(assignment.stages) + 8
        places = enumerate(assignment.stages)
        self.tracker = RoundTracker([(index, d) for index, place in places for d in place.devices])
        self._router = router = device.router
        tiles = tiles_of(description, assignment.stages[0])
        targets = _target_stages(assignment, description)
        self.feeder = Feeder(assignment, targets, router, tiles)
        self._description = description
        self._mesh = mesh = device.mesh
        self._states = device.states
        self._memory = device.memory
        self._check = check
        self._on_link = on_link
        self._is_held_up = is_held_up
        self._norms = None if max_norm is None else self._gatherer(max_norm)
        self._coefficients: Mailbox[int, Coefficient] = Mailbox("coefficient of round", 1)
        self._outputs = self._connect_outputs(router)
        self._free_bytes: dict[str, int] = {}
        self._has_begun = False
        self.draining = asyncio.Event()
        mesh.route_now(DONE, self._done)  # all wait for the last one
        mesh.route(FAILED, self._failed)
        mesh.route(NORMS, self._norm)

    @property
    def waits_for_user(self) -> bool:
        """For a sample of the data set, or a callback: no stage is to blame for that."""
        return self.feeder.waits_for_data or self._is_held_up()

    def _gatherer(self, max_norm: float) -> NormGatherer:
        owned: set[str] = set()
        names: list[list[str]] = []
        for place in self.assignment.stages:
            here = self._description.trainable_names(place.first, place.end)
            names.append([name for name in here if name not in owned])
            owned.update(here)
        dtypes = {tensor.name: tensor.dtype for tensor in self._description.tensors}
        order = [tensor.name for tensor in self._description.tensors if tensor.trainable]
        return NormGatherer(order, names, dtypes, max_norm)

    async def begin(self) -> bool:
        """Notify the devices of this plan that it is in force; returns whether that was news.

        Raises LinkClosed: one of them is out of reach.
        """
        if self._has_begun:
            return False
        self._has_begun = True
        for device in self.assignment.devices:
            await self._mesh.send(device, Message(BEGIN, self.assignment.key.fields()))
            await self.reach("begin.send.between")
        return True

    async def begin_without(self, device: str) -> None:
        """Notify a member that has no part in this plan that it is in force."""
        try:
            await self._mesh.send(device, Message(BEGIN, self.assignment.key.fields()))
        except PeerError as error:
            log.info("begin_not_delivered", member=device[:12], why=str(error))

    async def order(self, order: RoundOrder) -> None:
        """Send every device the next orders. Raises LinkClosed."""
        self.tracker.expect(order.round.index)
        message = Message(ROUND, {**self.assignment.key.fields(), **order.fields()})
        for device in self.assignment.devices:
            await self._mesh.send(device, message)

    async def no_more(self, rounds: int) -> None:
        """Notify every device that there are no more orders. Raises LinkClosed."""
        fields = {**self.assignment.key.fields(), **EndOfRounds(rounds).fields()}
        for device in self.assignment.devices:
            await self._mesh.send(device, Message(ROUND, fields))

    async def coefficient(self, shape: Round) -> Coefficient | None:
        """What this round's gradients are multiplied with; None where the job does not clip."""
        return None if self._norms is None else await self._coefficients.take(shape.index)

    @property
    def gradient_norm(self) -> float | None:
        """Of all gradients of the round whose coefficient was taken last, where it is finite."""
        norm = None if self._norms is None else self._norms.norm
        return norm if norm is not None and math.isfinite(norm) else None

    async def commit(self, commit: Commit) -> None:
        """Commit the update on every device.

        The last stages first: they have waited longest, and the first one, at the end of a round,
        is the one that the next round waits for; it is notified last, when that delays no other
        device.

        Raises:
            LinkClosed: a device is out of reach; the others have been notified.
        """
        message = Message(COMMIT, {**self.assignment.key.fields(), **commit.fields()})
        trouble: PeerError | None = None
        for device in reversed(self.assignment.devices):
            try:
                await self._mesh.send(device, message)
            except PeerError as error:
                trouble = trouble or error
            await self.reach("commit.send.between", commit.step)
        if trouble is not None:
            raise trouble

    async def settle(self) -> None:
        """Wait until every device has made the last update committed to it.

        A device that stops now resumes from there: nothing is computed again.

        Raises:
            PeerError: a device is out of reach.
            TimeoutError: it takes too long.
        """
        message = Message(SETTLED, self.assignment.key.fields())
        async with task_scope() as group:
            for device in self.assignment.devices:
                asked = call_while_it_works(
                    self._mesh,
                    device,
                    message,
                    timeout_seconds=SETTLE_TIMEOUT_SECONDS,
                    limits=self._settings.work_limits,
                )
                group.create_task(asked)

    async def output(self, key: MicroBatchKey) -> list[Value]:
        """The model's output leaves for an evaluated piece."""
        return (await self._outputs.take(key)).join()

    def at(self, step: int) -> Version:
        """What the stages are after `step` updates, the one that the generation begins with
        included."""
        first = self.assignment.version
        return first if step == first.step else Version(step, self.assignment.key.generation)

    async def gather(self, source: str) -> dict[str, Tensor]:
        """The whole state, by `model:` and `optimizer:` names, from `source` of every stage."""
        job = self.assignment.key.job
        parts: list[dict[str, Tensor]] = [{} for _ in self.assignment.stages]

        async def fetch(index: int) -> None:
            place = self.assignment.stages[index]
            backup_peer = place.backup_peer(self.assignment.holder)
            if backup_peer == self._mesh.self_id:
                here = await self._states.read(job, source, place.first, place.end)
                parts[index] = {n: copy_into(None, t) for n, t in here.tensors.items()}
                return
            request = TransferRequest(backup_peer, job, source, place.first, place.end)
            parts[index] = await self._read(request)
            await self.reach("checkpoint.gather.between")

        async with task_scope() as group:
            for index in range(len(parts)):
                group.create_task(fetch(index))
        return {name: tensor for part in reversed(parts) for name, tensor in part.items()}

    async def bring_home(
        self, load: Callable[[dict[str, Tensor]], None], source: str = WEIGHTS
    ) -> None:
        """Give `load` the trained weights stage by stage: they need not fit here all at once.

        The first stage comes last: of what stages share, its copy is the one that counts.
        """
        job = self.assignment.key.job
        for place in reversed(self.assignment.stages):
            backup_peer, units = place.backup_peer(self.assignment.holder), (place.first, place.end)
            if backup_peer == self._mesh.self_id:
                load(dict((await self._states.read(job, source, *units)).tensors))
            else:
                request = TransferRequest(backup_peer, job, source, *units)
                load(await self._read(request))
            await self.reach("home.between")

    async def _read(self, request: TransferRequest) -> dict[str, Tensor]:
        reading = read_state(self._mesh, request, self._check, self._known)
        return await while_it_works(self._mesh, request.peer, reading, self._settings.talk_limits)

    async def arrived(self, round_index: int) -> list[StageArrival]:
        """What the devices have noted of what came in a round; nothing of those that are silent."""
        async with task_scope() as scope:
            asked = [
                scope.create_task(self._arrived(device, round_index))
                for device in self.assignment.devices
            ]
        return [arrival for task in asked for arrival in task.result()]

    async def _arrived(self, device: str, round_index: int) -> Sequence[StageArrival]:
        fields = {**self.assignment.key.fields(), **RoundQuestion(round_index).fields()}
        try:
            reply = await self._mesh.call(
                device,
                Message(ARRIVED, fields),
                timeout_seconds=ARRIVED_TIMEOUT_SECONDS,
                reply_parts=limited(Arrivals.LIMIT.most_bytes),
            )
            noted = (await read_part(Arrivals, reply)).noted
        except (Error, TimeoutError) as error:
            log.info("no_arrivals", device=device[:12], why=str(error))
            return ()
        return [one for one in noted if one.stage in self.assignment.stages_of(device)]

    async def standings(self) -> dict[str, tuple[ProgressCounters, Standing]]:
        """What each device does and waits for; without those that do not answer."""
        async with task_scope() as scope:
            asked = {d: scope.create_task(self._standing(d)) for d in self.assignment.devices}
        found = {device: task.result() for device, task in asked.items()}
        return {device: standing for device, standing in found.items() if standing is not None}

    async def _standing(self, device: str) -> tuple[ProgressCounters, Standing] | None:
        try:
            reply = await self._mesh.call(
                device,
                Message(STANDING, self.assignment.key.fields()),
                timeout_seconds=self._settings.answer_seconds,
                reply_parts=limited(Standing.LIMIT.most_bytes),
            )
            return ProgressCounters.read(reply.fields), await read_part(Standing, reply)
        except (Error, TimeoutError) as error:
            log.info("no_standing", device=device[:12], why=str(error))
            return None

    async def diagnose(self, micro_batch_number: int) -> NonFiniteFinding | None:
        """The first unit whose values for that piece are not finite, if a stage still knows."""
        return await diagnose(self.assignment.stages, partial(self._diagnosed, micro_batch_number))

    async def _diagnosed(
        self, micro_batch_number: int, stage: int, device: str
    ) -> NonFiniteFinding | None:
        asked = DiagnoseRequest(stage, micro_batch_number)
        fields = {**self.assignment.key.fields(), **asked.fields()}
        reply = await self._mesh.call(
            device, Message(DIAGNOSE, fields), timeout_seconds=DIAGNOSE_TIMEOUT_SECONDS
        )
        found = FindingFields.read(reply.fields)
        found.check(len(self._description.units))
        if not found.found:
            return None
        stages, names = self.assignment.stages, (self.name(device),)
        # tiles do not look: it would take all their devices
        tiled = found.unit is None and stage == 1 and stages[0].tiling is not None
        first = stages[stage].first
        return NonFiniteFinding(names, stage, first, found.unit, found.parameters, tiled=tiled)

    async def reach(self, name: str, step: int = -1) -> None:
        """The holder has come to a place; see `failpoints`."""
        await failpoints.reach(name, device=self._mesh.self_id, step=step)

    def close(self) -> None:
        """Listen no more."""
        for kind in (DONE, FAILED, NORMS):
            self._mesh.unroute(kind)
        self._router.disconnect(self.assignment.key)

    def short_here(self) -> StageOutOfMemory:
        """This device has no memory for what it loads, or for what comes back."""
        me, has = self._mesh.self_id, self._memory()
        return StageOutOfMemory(me, self.name(me), MemoryShortage(has, has.has_two))

    # -- what comes in ---------------------------------------------------------------------------

    def _done(self, peer: str, message: Message) -> None:
        stage = self._stage(peer, message)
        if stage is not None:
            report = RoundReport.read(message.fields)
            self._free_bytes[peer] = report.free_bytes
            self.tracker.report((stage, peer), report)

    async def _norm(self, peer: str, message: Message) -> None:
        stage = self._stage(peer, message)
        if stage is None or self._norms is None:
            return
        if peer != self.assignment.stages[stage].leader:
            raise NotItsPart(f"norms of stage {stage} from a device that does not lead it")
        report = NormsReport.read(message.fields)
        coefficient = self._norms.add(stage, report.first, report.norms)
        if coefficient is not None:
            self._coefficients.put(report.round, cross_stage_gradients.to_number(coefficient))

    async def _failed(self, peer: str, message: Message) -> None:
        stage = self._stage(peer, message)
        if stage is None:
            return
        name = self.name(peer)
        report = FailureReport.read(message.fields)
        reason = report.message or "?"
        match report:
            case FailureReport(cause="not_finite", step=int(step)):
                self.tracker.fail(
                    MicroBatchNotFinite(
                        reason if report.micro_batch is not None else f"{name}: {reason}",
                        step,
                        micro_batch=report.micro_batch,
                        micro_batch_number=report.held_as,
                        is_update=report.is_update,
                    )
                )
            case FailureReport(cause="refused", sender=str(sender)):
                self.tracker.fail(SentWrong(sender, reason, peer))
            case FailureReport(cause="memory", short=MemoryShortage() as short):
                self.tracker.fail(StageOutOfMemory(peer, name, short))
            case FailureReport(cause="user"):
                error = TrainingError(f"{name}: {reason}")
                self.tracker.fail(PartFailed(peer, name, error))
            case FailureReport(cause="link", peer=str(other)):
                self._on_link(peer, other, report.back)
            case FailureReport(cause="peer"):
                broken = PeerError(f"{name}: {reason}")
                self.tracker.fail(PartFailed(peer, name, broken))
            case _:
                bug = InternalError(f"{name}, stage {stage} failed: {reason}")
                self.tracker.fail(PartFailed(peer, name, bug))

    def _stage(self, peer: str, message: Message) -> int | None:
        """The stage a message speaks for; None if it is of another generation."""
        spoken = StageKey.read(message.fields)
        if spoken.key != self.assignment.key:
            return None
        stage = spoken.stage
        if stage >= len(self.assignment.stages):
            raise ProtocolError(f"there is no stage {stage}")
        if peer not in self.assignment.stages[stage].devices:
            raise NotItsPart(f"{message.kind} for stage {stage} from another device")
        return stage

    def is_short(self, device: str) -> bool:
        """Whether hardly any memory was free there when it last reported."""
        return self._free_bytes.get(device, SHORT_BYTES) < SHORT_BYTES

    def memory_hint(self, device: str) -> str:
        """What may have become of a device that is gone.

        The kernel kills a process that takes too much silently; only its own log shows it.
        """
        advice = "see `dmesg` there, and start it with a smaller --memory"
        free_bytes = self._free_bytes.get(device)
        if free_bytes is None or free_bytes >= SHORT_BYTES:
            return f" (if it ran out of memory, {advice})"
        free = f"{size_text(free_bytes)} of its memory were free when it last reported"
        return f" ({free}: it may have run out of memory; {advice})"

    # -- helpers ---------------------------------------------------------------------------------

    def _connect_outputs(self, router: TensorRouter) -> TensorReceiver:
        stages = self.assignment.stages
        whole = contents_at_cut(self._description, stages[-1].end, "outputs")
        contents = StreamContents(  # the loss, their first, travels in the report
            "outputs",
            lambda mode, *sizes: whole.expected(mode, *sizes)[1:],
            lambda mode: whole.dimensions(mode)[1:],
        )
        receiver = TensorReceiver(
            contents,
            SampleDivision(stages[-1]).slices,
            capacity=self.evaluated_ahead,
            largest=self.assignment.largest,
            longest=self.assignment.longest,
        )
        stream = StreamId(self.assignment.key, len(stages), "outputs")
        router.connect_tensors(stream, receiver, stages[-1].devices)
        return receiver

    def name(self, device: str) -> str:
        """A device's name."""
        return display_name(self._mesh, device)


class StageOutOfMemory(TrainingError):
    """A device could not hold its part; `short` has what it may use for the job now."""

    def __init__(self, device: str, name: str, short: MemoryShortage) -> None:
        beside = " beside its accelerator's" if short.in_host else ""
        super().__init__(f"{name} ran out of memory{beside}")
        self.device, self.name = device, name
        self.short = short


class PartFailed(PeerError):
    """A device says that its part of the plan cannot go on.

    Attributes:
        device: its id.
        name: its display name.
        error: what it says.
    """

    def __init__(self, device: str, name: str, error: Error) -> None:
        super().__init__(str(error))
        self.device, self.name = device, name
        self.error = error


class SentWrong(PeerError):
    """A device has sent what it should not, or nothing: it gets no more work.

    Attributes:
        device: its id; None = no device is to blame, and the plan is made once more.
        witness: id of the device that says so.
        cleared: ids of devices that get work again: they were left out for it, and it was not they.
    """

    def __init__(
        self,
        device: str | None,
        message: str,
        witness: str,
        cleared: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(message)
        self.device = device
        self.witness = witness
        self.cleared = cleared


def _target_stages(assignment: Assignment, description: ModelDescription) -> list[int]:
    return [
        index
        for index, place in enumerate(assignment.stages)
        if (assignment.weighed and place is assignment.stages[-1])
        or any(description.target_uses(place.first, place.end, mode.value) for mode in RoundMode)
    ]
