"""What every device does for the jobs of others: measure, prepare, train, hand over its state.

A device works for one job at a time. It drops the job when the holder says so, when the holder is
dead or has left, or when a newer epoch of the job replaces it; then it is ready for the next.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Mapping, Sequence
from functools import partial

from p2ptrain.errors import Error, NotCoordinator, PeerError, ProtocolError, UserError
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import MemberChanged, MemberState, Mesh, MeshEvent
from p2ptrain.model.description import ModelDescription
from p2ptrain.model.diagnosis import NonFinite
from p2ptrain.model.optimizer_spec import optimizer_from_fields
from p2ptrain.model.stage import Stage
from p2ptrain.net import cbor
from p2ptrain.net.message import Message, Priority
from p2ptrain.training.allocator import trim_heap
from p2ptrain.training.assignment import Assignment
from p2ptrain.training.budget import (
    anonymous_bytes,
    available_memory_bytes,
    is_out_of_memory,
    usable_memory_bytes,
)
from p2ptrain.training.compute import ComputeThread
from p2ptrain.training.engagement import Engagement
from p2ptrain.training.epoch_links import Shell
from p2ptrain.training.first_weights import first_weights
from p2ptrain.training.parts import limited
from p2ptrain.training.profiling import ProfileCache, measure
from p2ptrain.training.protocol import (
    BLOB_LIMIT_BYTES,
    COMMIT,
    DIAGNOSE,
    END,
    FAILED,
    FETCH_MODEL,
    MEASURE_LINKS,
    MEASURE_PROFILE,
    MODEL_LIMIT_BYTES,
    PREPARE,
    ROUND,
    Commit,
    EpochKey,
    RoundOrder,
    integer,
    text,
)
from p2ptrain.training.routes import Route
from p2ptrain.training.stage_runner import NotFinite
from p2ptrain.training.state_check import state_check
from p2ptrain.training.state_transfer import INITIAL, STAGE, WEIGHTS, StateServer
from p2ptrain.training.switchboard import Switchboard

log = get_logger(__name__)

FETCH_TIMEOUT_SECONDS = 120.0
FAILURE_TEXT_LIMIT = 1500
LINK_SECONDS = 0.12
"""How long one direction of a link is measured: 1.5 MB at 100 Mbit/s, well past its slow start."""


class TrainingService:
    """One a device, from the start to the end of its membership.

    Attributes:
        engagement: this device's part in the current job, if any.
        idle: set while there is none.
    """

    def __init__(
        self,
        mesh: Mesh,
        compute: ComputeThread,
        profiles: ProfileCache,
        memory_bytes: int | None = None,
    ) -> None:
        self.mesh = mesh
        self.compute = compute
        self.switchboard = Switchboard(mesh)
        self.states = StateServer(mesh)
        self.engagement: Engagement | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self._profiles = profiles
        self._memory_bytes = memory_bytes
        self._idle_bytes = anonymous_bytes()
        self._models: dict[str, ModelDescription] = {}
        self._newest: dict[str, int] = {}
        self._shell = Shell(mesh, self.switchboard, compute)
        self._endings: set[asyncio.Task[None]] = set()
        self._unsubscribe = mesh.subscribe(self._on_mesh_event)
        mesh.route_now(COMMIT, self._commit)  # the next round waits for it

    @property
    def routes(self) -> Mapping[str, Route]:
        """What this device answers, by kind."""
        blob = limited(BLOB_LIMIT_BYTES)
        return {
            MEASURE_PROFILE: Route(self._measure_profile),
            MEASURE_LINKS: Route(self._measure_links),
            PREPARE: Route(self._prepare, blob),
            ROUND: Route(self._round),
            DIAGNOSE: Route(self._diagnose),
            END: Route(self._end),
        }

    @property
    def job(self) -> str | None:
        """The job this device works for."""
        return self.engagement.assignment.key.job if self.engagement else None

    @property
    def holder_name(self) -> str | None:
        """Of the job this device works for."""
        if self.engagement is None:
            return None
        holder = self.engagement.assignment.holder
        member = self.mesh.members.get(holder)
        return member.name if member is not None else holder[:12]

    async def close(self) -> None:
        """Drop any job and stop serving."""
        self._unsubscribe()
        await self.drop("this device is leaving")
        if self._endings:
            await asyncio.gather(*self._endings)

    def know_model(self, description: ModelDescription) -> None:
        """Spare fetching a model that was captured here."""
        self._models = {description.digest: description}

    async def drop(self, reason: str, job: str | None = None) -> None:
        """Leave the current job, if any; with `job`, only if it is that one."""
        if job is not None and self.job != job:
            return
        engagement, self.engagement = self.engagement, None
        if engagement is None:
            return
        log.info("job_dropped", job=engagement.assignment.key.job, reason=reason)
        # What the holder itself offers outlives a plan.
        self.states.withdraw(engagement.assignment.key.job, keep=(INITIAL,))
        self.states.relays.end(engagement.assignment.key, reason)
        await engagement.stop()
        del engagement  # and with it the weights
        trim_heap()
        self.idle.set()

    # -- routes ----------------------------------------------------------------------------------

    async def _measure_profile(self, peer: str, message: Message) -> Message:
        """Unit times of a model on this device, and the memory it offers now."""
        job = text(message.fields, "job", 64)
        if self.job not in (None, job):
            raise PeerError(f"{self.mesh.name} already works for another job")
        description = await self._model(message.fields)
        sizes = _sizes(message.fields.get("batch_sizes"))
        budget = self._budget_bytes()
        with timed(log, "measured"):
            measured = await measure(description, sizes, self.compute, self._profiles, budget)
        memory_bytes = self._budget_bytes()
        taken = max(anonymous_bytes() - self._idle_bytes, 0)
        content = {"measured": measured, "memory_bytes": memory_bytes, "taken_bytes": taken}
        blob = cbor.dumps(content)
        return Message(MEASURE_PROFILE, {}, (memoryview(blob),))

    async def _measure_links(self, peer: str, message: Message) -> Message:
        """What this device can send to each of the given members, one after the other."""
        peers = message.fields.get("peers")
        if not isinstance(peers, list) or len(peers) > 64:
            raise ProtocolError("field 'peers' is not a list of members")
        speeds = []
        for target in peers:
            try:
                speed = await self.mesh.measure_link(str(target), LINK_SECONDS)
                speeds.append([target, speed.bytes_per_s, speed.latency_s])
            except (PeerError, TimeoutError) as error:
                log.info("link_not_measured", target=str(target)[:12], why=str(error))
        return Message(MEASURE_LINKS, {"speeds": speeds})

    async def _prepare(self, peer: str, message: Message) -> Message:
        """Take a part in an epoch: fetch the weights, build the stages, be ready."""
        assignment = Assignment.from_bytes(message.parts[0])
        ready = False
        try:
            answer = await self._take_part(assignment, message.fields)
            ready = answer.fields["ready"] is True
        finally:
            if not ready:
                why = f"{self.mesh.name} could not be made ready"
                self.states.relays.give_up(assignment, self.mesh.self_id, why)
        return answer

    async def _take_part(self, assignment: Assignment, fields: Mapping[str, object]) -> Message:
        self._check_newer(assignment)
        if self.job is not None and self.job != assignment.key.job:
            raise PeerError(f"{self.mesh.name} already works for another job")
        self._newest = {assignment.key.job: assignment.key.epoch}
        await self.drop("a new plan")
        short = self._short_of(integer(fields, "needed_bytes", 0, 2**63))
        if short is not None:
            return short
        description = await self._model({"digest": assignment.digest, "holder": assignment.holder})
        if self._newest != {assignment.key.job: assignment.key.epoch}:
            raise PeerError("another plan came while this device was made ready")
        engagement = Engagement(assignment, description, self._shell)
        self.engagement = engagement
        self.idle.clear()
        try:
            read = partial(optimizer_from_fields, assignment.optimizer)
            spec = await self.compute.run((0,), read)
            check = await self.compute.run((0,), partial(state_check, description, spec))
            fetch = partial(first_weights, self.mesh, self.states, assignment, check)
            with timed(log, "stages_built"):
                await engagement.prepare(fetch, spec)
        except BaseException as error:
            await self._abandon(engagement)
            if is_out_of_memory(error):
                return self._out_of_memory()
            raise
        if self.engagement is not engagement:
            await engagement.stop()
            raise PeerError("the job ended while this device was made ready")
        trim_heap()  # what the weights' way here has taken
        self.states.offer(assignment.key.job, STAGE, engagement.state, engagement.applied)
        self.states.offer(assignment.key.job, WEIGHTS, engagement.weights, engagement.applied)
        engagement.start(partial(self._report_failure, assignment))
        return Message(PREPARE, {"ready": True})

    def _short_of(self, needed_bytes: int) -> Message | None:
        """The answer where a part would need more memory than there is, now that it is to begin."""
        trim_heap()
        most = self._most(available_memory_bytes())
        return self._out_of_memory() if needed_bytes > most else None

    def _out_of_memory(self) -> Message:
        return Message(PREPARE, {"ready": False, "memory_bytes": self._budget_bytes()})

    def _budget_bytes(self) -> int:
        trim_heap()  # what measuring, or a job before, has used is free for the next
        return self._most(usable_memory_bytes())

    def _most(self, free_bytes: int) -> int:
        """What a job may take of what is free."""
        return free_bytes if self._memory_bytes is None else min(self._memory_bytes, free_bytes)

    def _check_newer(self, assignment: Assignment) -> None:
        coordinator = self.mesh.coordinator
        if coordinator is not None and assignment.term < coordinator.term:
            raise NotCoordinator(
                f"a command of term {assignment.term}; {coordinator.term} is in force"
            )
        if assignment.key.epoch <= self._newest.get(assignment.key.job, -1):
            raise PeerError(f"epoch {assignment.key.epoch} is not newer than the one in force")
        if self.mesh.self_id not in assignment.devices:
            raise ProtocolError("an assignment without this device")

    async def _abandon(self, engagement: Engagement) -> None:
        await engagement.stop()
        if self.engagement is engagement:
            self.engagement = None
            self.idle.set()

    async def _round(self, peer: str, message: Message) -> None:
        engagement = self._engaged(peer, message)
        if engagement is None:
            return
        order = RoundOrder.read(message.fields)
        self.states.relays.end(engagement.assignment.key, "training has begun")
        job, key = engagement.assignment.key.job, order.round.step + 1
        if order.keep:
            kept = partial(engagement.snapshot, key)
            self.states.offer(job, f"snapshot:{key}", kept, engagement.applied)
        await engagement.order(order)

    def _commit(self, peer: str, message: Message) -> None:
        engagement = self._engaged(peer, message)
        if engagement is not None:
            engagement.commit(Commit.read(message.fields))

    async def _diagnose(self, peer: str, message: Message) -> Message:
        """Where a piece that this device still holds first stopped being finite."""
        engagement = self._engaged(peer, message)
        if engagement is None:
            raise PeerError("that epoch is over")
        piece = integer(message.fields, "micro_batch")
        for index, runner in engagement.runners.items():
            run = partial(_first_non_finite, runner.live.stage, piece)
            found = await self.compute.run((0, index), run)
            if found is not None:
                fields = {"found": True, "unit": found.unit, "parameters": found.parameters}
                return Message(DIAGNOSE, fields)
        return Message(DIAGNOSE, {"found": False})

    async def _end(self, peer: str, message: Message) -> None:
        engagement = self.engagement
        job = text(message.fields, "job", 64)
        if engagement is None or engagement.assignment.key.job != job:
            return
        if peer != engagement.assignment.holder:
            raise ProtocolError("job.end from a device that is not the holder")
        await self.drop(text(message.fields, "reason", 1024), job)

    def _engaged(self, peer: str, message: Message) -> Engagement | None:
        """The engagement a holder's message is for, or None if it is over. Refuses strangers."""
        key = EpochKey.read(message.fields)
        engagement = self.engagement
        if engagement is None or engagement.assignment.key != key:
            return None
        if peer != engagement.assignment.holder:
            raise ProtocolError(f"{message.kind} from a device that is not the holder")
        return engagement

    # -- helpers ---------------------------------------------------------------------------------

    async def _model(self, fields: Mapping[str, object]) -> ModelDescription:
        digest = text(fields, "digest", 64)
        if digest not in self._models:
            holder = text(fields, "holder", 64)
            with timed(log, "model_fetched"):
                reply = await self.mesh.call(
                    holder,
                    Message(FETCH_MODEL, {"digest": digest}),
                    timeout_seconds=FETCH_TIMEOUT_SECONDS,
                    priority=Priority.TENSOR,
                    reply_parts=limited(MODEL_LIMIT_BYTES),
                )
            blob = bytes(reply.parts[0])
            with timed(log, "model_read"):
                read = partial(ModelDescription.from_bytes, blob)
                description = await self.compute.run((0,), read)
            if description.digest != digest:
                raise ProtocolError("the holder sent another model than it announced")
            self._models = {digest: description}
        return self._models[digest]

    async def _report_failure(
        self, assignment: Assignment, stage: int, error: BaseException
    ) -> None:
        fields = {**assignment.key.fields(), "stage": stage, **_failure_fields(error)}
        if is_out_of_memory(error):
            fields["memory_bytes"] = self._budget_bytes()
        if not isinstance(error, Error):
            log.error("stage_failed", stage=stage, trace="".join(traceback.format_exception(error)))
        try:
            await self.mesh.send(assignment.holder, Message(FAILED, fields))
        except PeerError as gone:
            log.warning("failure_not_reported", stage=stage, why=str(gone))

    def _on_mesh_event(self, event: MeshEvent) -> None:
        if not isinstance(event, MemberChanged) or self.engagement is None:
            return
        gone = event.member.state in (MemberState.DEAD, MemberState.LEFT)
        if gone and event.member.id == self.engagement.assignment.holder:
            reason = f"the data holder {event.member.name} is {event.member.state}"
            task = asyncio.get_running_loop().create_task(self.drop(reason))
            self._endings.add(task)
            task.add_done_callback(self._endings.discard)


def _first_non_finite(stage: Stage, piece: int) -> NonFinite | None:
    """In the compute thread, where nothing takes the piece away meanwhile."""
    return stage.first_non_finite(piece) if stage.holds(piece) else None


def _failure_fields(error: BaseException) -> dict[str, object]:
    if isinstance(error, NotFinite):
        return {
            "cause": "not_finite",
            "message": str(error),
            "step": error.step,
            "micro_batch": error.key.micro_batch,
        }
    message = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        message = "it ran out of memory"
    return {"cause": _cause(error), "message": message[:FAILURE_TEXT_LIMIT]}


def _cause(error: BaseException) -> str:
    if is_out_of_memory(error):
        return "memory"
    if isinstance(error, UserError):
        return "user"
    return "peer" if isinstance(error, PeerError) else "bug"


def _sizes(value: object) -> Sequence[int]:
    valid = isinstance(value, list) and 0 < len(value) <= 16
    if not valid or not all(isinstance(size, int) and 0 < size <= 1 << 20 for size in value):  # type: ignore[attr-defined]
        raise ProtocolError("field 'batch_sizes' is not a list of sizes")
    return list(value)  # type: ignore[call-overload, no-any-return]
