"""What every device does for the jobs of others: measure, prepare, train, hand over its state.

A device works for one job at a time, see `participation`. It drops the job when the holder says so,
or is dead or has left; then it is ready for the next.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from p2ptrain.errors import Error, PeerError, ProtocolError, UserError
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import LinkLost, Member, MemberChanged, MemberState, Mesh, MeshEvent
from p2ptrain.model.description import ModelDescription
from p2ptrain.model.diagnosis import NonFinite
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
from p2ptrain.training.participation import Participation, Surroundings
from p2ptrain.training.parts import limited
from p2ptrain.training.profiling import ProfileCache, measure
from p2ptrain.training.protocol import (
    BEGIN,
    BLOB_LIMIT_BYTES,
    COMMIT,
    DIAGNOSE,
    END,
    FAILED,
    FETCH_MODEL,
    INVENTORY,
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
from p2ptrain.training.recovery.device_events import HolderState
from p2ptrain.training.recovery.holdings import Inventory
from p2ptrain.training.routes import Route
from p2ptrain.training.stage_runner import NotFinite
from p2ptrain.training.state_transfer import StateServer
from p2ptrain.training.switchboard import Switchboard

log = get_logger(__name__)

FETCH_TIMEOUT_SECONDS = 120.0
FAILURE_TEXT_LIMIT = 1500
LINK_SECONDS = 0.12
"""How long one direction of a link is measured: 1.5 MB at 100 Mbit/s, well past its slow start."""


class TrainingService:
    """One a device, from the start to the end of its membership.

    Attributes:
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
        self.idle = asyncio.Event()
        self.idle.set()
        self._profiles = profiles
        self._memory_bytes = memory_bytes
        self._idle_bytes = anonymous_bytes()
        self._models: dict[str, ModelDescription] = {}
        self._offers: dict[str, _Offer] = {}  # by model
        self._speeds: dict[str, tuple[float, float]] = {}  # to a peer: bytes/s, seconds
        self._part: Participation | None = None
        self._surroundings = Surroundings(
            mesh=mesh,
            compute=compute,
            states=self.states,
            shell=Shell(mesh, self.switchboard, compute),
            model=self._model,
            short_of=self._short_of,
            budget_bytes=self._budget_bytes,
            inventory=self._complete,
            on_failure=self._report_failure,
            told=self._tell_holder,
            changed=self._on_change,
        )
        self._unsubscribe = mesh.subscribe(self._on_mesh_event)
        mesh.route_now(COMMIT, self._commit)  # the next round waits for it

    @property
    def routes(self) -> Mapping[str, Route]:
        """What this device answers, by kind."""
        return {
            MEASURE_PROFILE: Route(self._measure_profile),
            MEASURE_LINKS: Route(self._measure_links),
            INVENTORY: Route(self._inventory),
            PREPARE: Route(self._prepare, limited(BLOB_LIMIT_BYTES, 2)),
            BEGIN: Route(self._begin),
            ROUND: Route(self._round),
            DIAGNOSE: Route(self._diagnose),
            END: Route(self._end),
        }

    @property
    def job(self) -> str | None:
        """The job this device works for."""
        return self._part.job if self._part is not None and self._part.is_busy else None

    @property
    def engagement(self) -> Engagement | None:
        """The stages that this device has, if any."""
        return self._part.engagement if self._part is not None else None

    @property
    def holder_name(self) -> str | None:
        """Of the job this device works for."""
        holder = self._part.holder if self._part is not None and self._part.is_busy else None
        if holder is None:
            return None
        member = self.mesh.members.get(holder)
        return member.name if member is not None else holder[:12]

    async def close(self) -> None:
        """Drop any job and stop serving."""
        self._unsubscribe()
        await self.drop()

    def know_model(self, description: ModelDescription) -> None:
        """Spare fetching a model that was captured here."""
        self._models = {description.digest: description}

    async def drop(self, job: str | None = None) -> None:
        """Leave the current job, if any; with `job`, only if it is that one."""
        part = self._part
        if part is None or job not in (None, part.job):
            return
        log.info("job_dropped", job=part.job)
        await part.close()

    # -- routes ----------------------------------------------------------------------------------

    async def _measure_profile(self, peer: str, message: Message) -> Message:
        """Unit times of a model on this device, and the memory it offers now."""
        job = text(message.fields, "job", 64)
        if self.job not in (None, job):
            raise PeerError(f"{self.mesh.name} already works for another job")
        digest = text(message.fields, "digest", 64)
        description = await self._model(digest, text(message.fields, "holder", 64))
        sizes = _sizes(message.fields.get("batch_sizes"))
        budget = self._budget_bytes()
        with timed(log, "measured"):
            measured = await measure(description, sizes, self.compute, self._profiles, budget)
        memory_bytes = self._budget_bytes()
        taken = max(anonymous_bytes() - self._idle_bytes, 0)
        self._offers = {digest: _Offer(measured, memory_bytes, taken)}
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
                if speed.bytes_per_s > 0:
                    self._speeds[str(target)] = (speed.bytes_per_s, speed.latency_s)
            except (PeerError, TimeoutError) as error:
                log.info("link_not_measured", target=str(target)[:12], why=str(error))
        return Message(MEASURE_LINKS, {"speeds": speeds})

    async def _inventory(self, peer: str, message: Message) -> Message:
        """Stop working on a job, and say what is here of it."""
        job = text(message.fields, "job", 64)
        if self.job not in (None, job):
            raise PeerError(f"{self.mesh.name} already works for another job")
        if self._part is None or self._part.job != job:
            self._part = Participation(job, self._surroundings)
        return await self._part.take_stock(peer, message)

    async def _prepare(self, peer: str, message: Message) -> Message:
        """Take a part in an epoch: fetch the weights, build the stages, be ready."""
        assignment = Assignment.from_bytes(message.parts[0])
        part = self._part
        if part is None or part.job != assignment.key.job:
            raise PeerError(f"{self.mesh.name} was not asked what it has of that job")
        return await part.prepare(peer, assignment, message)

    async def _begin(self, peer: str, message: Message) -> None:
        key = EpochKey.read(message.fields)
        if self._part is not None and self._part.job == key.job:
            self._part.begin(peer, key.epoch)

    def _short_of(self, needed_bytes: int) -> int | None:
        """The memory there is, where a part would need more of it, now that it is to begin."""
        trim_heap()
        most = self._most(available_memory_bytes())
        return self._budget_bytes() if needed_bytes > most else None

    def _budget_bytes(self) -> int:
        trim_heap()  # what measuring, or a job before, has used is free for the next
        return self._most(usable_memory_bytes())

    def _most(self, free_bytes: int) -> int:
        """What a job may take of what is free."""
        return free_bytes if self._memory_bytes is None else min(self._memory_bytes, free_bytes)

    async def _round(self, peer: str, message: Message) -> None:
        key = EpochKey.read(message.fields)
        if self._part is not None and self._part.job == key.job:
            await self._part.order(peer, key, RoundOrder.read(message.fields))

    def _commit(self, peer: str, message: Message) -> None:
        key = EpochKey.read(message.fields)
        if self._part is not None and self._part.job == key.job:
            self._part.commit(peer, key, Commit.read(message.fields))

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
        part, job = self._part, text(message.fields, "job", 64)
        if part is None or part.job != job:
            return
        if peer != part.holder:
            raise ProtocolError("job.end from a device that is not the holder")
        log.info("job_ended", job=job, reason=text(message.fields, "reason", 1024))
        part.holder_is(HolderState.LEFT)

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

    async def _model(self, digest: str, holder: str) -> ModelDescription:
        if digest not in self._models:
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

    def _complete(self, inventory: Inventory, digest: str) -> Inventory:
        """With what this device has measured, and what it offered when it was idle."""
        gone = (MemberState.DEAD, MemberState.LEFT)
        away = {m.id for m in self.mesh.members.values() if m.state in gone}
        offer = self._offers.get(digest)
        return replace(
            inventory,
            linked=inventory.linked - away,
            budget_bytes=0 if offer is None else offer.memory_bytes,
            taken_bytes=0 if offer is None else offer.taken_bytes,
            speeds=tuple((peer, *speed) for peer, speed in self._speeds.items()),
            measured=None if offer is None else offer.measured,
        )

    async def _report_failure(
        self, assignment: Assignment, stage: int, error: BaseException
    ) -> None:
        fields = {**assignment.key.fields(), "stage": stage, **_failure_fields(error)}
        if is_out_of_memory(error):
            fields["memory_bytes"] = self._budget_bytes()
        if not isinstance(error, Error):
            log.error("stage_failed", stage=stage, trace="".join(traceback.format_exception(error)))
        await self._send_failed(assignment, fields)

    async def _tell_holder(self, assignment: Assignment, fields: Mapping[str, object]) -> None:
        stage = assignment.stages_of(self.mesh.self_id)[0]
        await self._send_failed(assignment, {**assignment.key.fields(), "stage": stage, **fields})

    async def _send_failed(self, assignment: Assignment, fields: Mapping[str, object]) -> None:
        try:
            await self.mesh.send(assignment.holder, Message(FAILED, dict(fields)))
        except PeerError as gone:
            log.warning("failure_not_reported", why=str(gone))

    def _on_change(self) -> None:
        if self._part is not None and self._part.is_busy:
            self.idle.clear()
        else:
            self.idle.set()

    def _on_mesh_event(self, event: MeshEvent) -> None:
        part = self._part
        if part is None:
            return
        if isinstance(event, LinkLost):
            part.link_ended(event.peer_id)
        elif isinstance(event, MemberChanged) and event.member.id == part.holder:
            self._on_holder(part, event.member)

    @staticmethod
    def _on_holder(part: Participation, holder: Member) -> None:
        if holder.state in (MemberState.DEAD, MemberState.LEFT):
            log.info("holder_gone", name=holder.name, state=holder.state)
            part.holder_is(HolderState.LEFT)


@dataclass(frozen=True)
class _Offer:
    """What this device measured of a model and offered for it, last.

    Attributes:
        taken_bytes: what the job had taken by then.
    """

    measured: Mapping[str, Any]
    memory_bytes: int
    taken_bytes: int


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
