"""The coordinator's work: survey the household, plan, and make every device of the plan ready.

Every device can do this; the elected one does. It keeps nothing that the holder and the devices do
not also have, so a newly elected coordinator is ready at once.

    request -> links, profiles -> plan -> prepare on every device -> answer to the holder
                  ^                              |
                  +---- without the device <-----+  that cannot be measured or made ready
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import monotonic

from p2ptrain.errors import Error, NotCoordinator, PeerError, PlanError, ProtocolError
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import LinkSpeed, MemberState, Mesh
from p2ptrain.net import cbor
from p2ptrain.net.message import Message
from p2ptrain.plan.cluster import Link
from p2ptrain.plan.plan import LeftOut, Plan
from p2ptrain.training.assignment import Assignment, StagePlace
from p2ptrain.training.household_plan import Candidate, MeasuredHousehold
from p2ptrain.training.parts import limited
from p2ptrain.training.plan_request import PlanningAnswer, PlanningRequest
from p2ptrain.training.plan_search import PlanSearch
from p2ptrain.training.profiling import batch_sizes_to_measure
from p2ptrain.training.protocol import (
    BLOB_LIMIT_BYTES,
    MEASURE_LINKS,
    MEASURE_PROFILE,
    PLAN_REQUEST,
    PREPARE,
    SURVEY_LINKS,
    EpochKey,
    integer,
)
from p2ptrain.training.routes import Route
from p2ptrain.training.scope import task_scope
from p2ptrain.training.survey import LinkTable
from p2ptrain.training.waiting import unless, until

log = get_logger(__name__)

PROFILE_TIMEOUT_SECONDS = 60.0
LINK_TIMEOUT_SECONDS = 20.0
PREPARE_TIMEOUT_SECONDS = 600.0
ALIVE_TIMEOUT_SECONDS = 10.0
MOST_ATTEMPTS = 8
"""Plans made for one request, beside one for each device that may prove unable: every further one
knows of less memory."""


class CoordinatorService:
    """Answers planning requests while this device is the coordinator."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._links = LinkTable()
        self._search = PlanSearch(mesh)
        self._surveying = asyncio.Lock()
        self._epochs: dict[str, int] = {}

    @property
    def routes(self) -> Mapping[str, Route]:
        """What this device answers, by kind."""
        return {
            **self._search.routes,
            PLAN_REQUEST: Route(self._plan, limited(BLOB_LIMIT_BYTES)),
            SURVEY_LINKS: Route(self._survey),
        }

    async def _survey(self, peer: str, message: Message) -> Message:
        """Measure the links ahead of a request, while the holder still exports its model."""
        self._check_in_office()
        await self._measure_links([d for d in self._alive() if d != peer])
        return Message(SURVEY_LINKS)

    async def _plan(self, peer: str, message: Message) -> Message:
        """Plan and make ready, as long as the term lasts: devices would refuse its orders after."""
        request = PlanningRequest.from_bytes(message.parts[0])
        term = self._check_in_office()
        work = self._plan_in_term(peer, request, term)
        answer = await unless(self._mesh, lambda: not self._in_office(term), work)
        if answer is None:
            raise NotCoordinator(f"{self._mesh.name} does not coordinate any more")
        return answer

    async def _plan_in_term(self, peer: str, request: PlanningRequest, term: int) -> Message:
        await self._seen_alive(peer)
        devices = [peer] if request.alone else self._alive()
        with timed(log, "links_measured"):
            await self._measure_links(devices)
        with timed(log, "profiled"):
            candidates, left_out = await self._profile(request, peer, devices)
        for _ in range(MOST_ATTEMPTS + len(candidates)):
            with timed(log, "planned"):
                plan = await self._make_plan(request, peer, candidates)
            assignment = self._assignment(request, peer, plan, candidates, term)
            with timed(log, "prepared"):
                troubles = await self._prepare(assignment, plan)
            if not troubles:
                plan = replace(plan, left_out=(*plan.left_out, *left_out))
                return _answer(assignment, plan, candidates, request)
            candidates = _without_trouble(candidates, troubles)
            gone = {t.name: t.reason for t in troubles if not t.out_of_memory}
            self._give_up_if_needed(gone, peer, request)
            left_out += [LeftOut(name, reason) for name, reason in gone.items()]
        raise PlanError(
            f"{troubles[0].name} could not be made ready for any plan: {troubles[0].reason}"
        )

    # -- who and when ----------------------------------------------------------------------------

    def _check_in_office(self) -> int:
        coordinator = self._mesh.coordinator
        if coordinator is None or coordinator.id != self._mesh.self_id:
            name = coordinator.name if coordinator else "nobody yet"
            raise NotCoordinator(f"{self._mesh.name} does not coordinate; {name} does")
        return coordinator.term

    def _in_office(self, term: int) -> bool:
        coordinator = self._mesh.coordinator
        return coordinator is not None and (coordinator.id, coordinator.term) == (
            self._mesh.self_id,
            term,
        )

    async def _seen_alive(self, peer: str) -> None:
        """A holder may ask before gossip tells, or while it is suspected; it hears of that soon."""
        try:
            async with asyncio.timeout(ALIVE_TIMEOUT_SECONDS):
                await until(self._mesh, lambda: peer in self._alive())
        except TimeoutError:
            raise PeerError(
                f"{self._mesh.name}, which coordinates, does not see this device as alive"
            ) from None

    def _alive(self) -> list[str]:
        members = self._mesh.members.values()
        return sorted(m.id for m in members if m.state is MemberState.ALIVE)

    def _name(self, device: str) -> str:
        return self._mesh.members[device].name

    # -- measuring -------------------------------------------------------------------------------

    async def _measure_links(self, devices: list[str]) -> None:
        async with self._surveying:
            for pairs in self._links.missing(devices, monotonic()):
                async with task_scope() as group:
                    for one, other in pairs:
                        group.create_task(self._measure_link(one, other))
                        group.create_task(self._measure_link(other, one))

    async def _measure_link(self, sender: str, receiver: str) -> None:
        try:
            reply = await self._mesh.call(
                sender,
                Message(MEASURE_LINKS, {"peers": [receiver]}),
                timeout_seconds=LINK_TIMEOUT_SECONDS,
            )
            for _, bytes_per_s, latency_s in _speeds(reply):
                speed = LinkSpeed(bytes_per_s, latency_s)
                self._links.record(sender, receiver, speed, monotonic())
        except (PeerError, TimeoutError) as error:
            log.info("link_not_measured", sender=sender[:12], why=str(error))

    async def _profile(
        self, request: PlanningRequest, holder: str, devices: list[str]
    ) -> tuple[list[Candidate], list[LeftOut]]:
        """Every device's unit times, measured side by side."""
        sizes = batch_sizes_to_measure(
            request.batch_size, request.micro_batch, len(devices), request.least_piece
        )
        answers = await asyncio.gather(
            *(self._profile_one(request, holder, device, sizes) for device in devices)
        )
        candidates = [answer for answer in answers if isinstance(answer, Candidate)]
        left_out = [answer for answer in answers if isinstance(answer, LeftOut)]
        if not any(candidate.id == holder for candidate in candidates):
            reason = next(out.reason for out in left_out if out.name == self._name(holder))
            raise PlanError(f"the data holder's own profile failed: {reason}")
        return candidates, left_out

    async def _profile_one(
        self, request: PlanningRequest, holder: str, device: str, sizes: list[int]
    ) -> Candidate | LeftOut:
        name = self._name(device)
        fields = {
            "job": request.job,
            "digest": request.digest,
            "holder": holder,
            "batch_sizes": sizes,
        }
        try:
            reply = await self._mesh.call(
                device,
                Message(MEASURE_PROFILE, fields),
                timeout_seconds=PROFILE_TIMEOUT_SECONDS,
                reply_parts=limited(BLOB_LIMIT_BYTES),
            )
            return _candidate(device, name, reply, request.memory_bytes.get(device))
        except TimeoutError:
            return LeftOut(name, f"did not answer within {PROFILE_TIMEOUT_SECONDS:.0f} s")
        except Error as error:
            return LeftOut(name, str(error))

    # -- planning --------------------------------------------------------------------------------

    async def _make_plan(
        self, request: PlanningRequest, holder: str, candidates: list[Candidate]
    ) -> Plan:
        names = {candidate.id: candidate.name for candidate in candidates}
        links = {
            (names[a], names[b]): Link(speed.bytes_per_s, speed.latency_s)
            for (a, b), speed in self._links.speeds(list(names)).items()
        }
        household = MeasuredHousehold(candidates, links, names[holder])
        return await self._search.plan(request, household)

    def _assignment(
        self,
        request: PlanningRequest,
        holder: str,
        plan: Plan,
        candidates: list[Candidate],
        term: int,
    ) -> Assignment:
        ids = {candidate.name: candidate.id for candidate in candidates}
        epoch = max(request.epoch, self._epochs.get(request.job, 0) + 1)
        self._epochs = {request.job: epoch}
        return Assignment(
            key=EpochKey(request.job, epoch),
            term=term,
            holder=holder,
            digest=request.digest,
            stages=tuple(
                StagePlace(
                    *stage.units,
                    warmup=stage.warmup,
                    devices=tuple(ids[device.name] for device in stage.devices),
                    shares=tuple(device.share for device in stage.devices),
                    allocation=stage.allocation,
                    held=stage.held,
                )
                for stage in plan.stages
            ),
            batch_size=request.batch_size,
            micro_batch=plan.micro_batch,
            optimizer=request.optimizer,
            seed=request.seed,
            clip=request.clip,
            first_step=request.first_step,
            wire=request.wire,
        )

    # -- making ready ----------------------------------------------------------------------------

    async def _prepare(self, assignment: Assignment, plan: Plan) -> list[_Trouble]:
        """Have every device fetch its weights; what hinders those that cannot.

        Raises:
            NotCoordinator: a device knows of a newer term.
        """
        blob = memoryview(assignment.to_bytes())

        async def prepare(device: str) -> _Trouble | None:
            name = self._name(device)
            needed_bytes = plan.predicted.peak_bytes[name]
            try:
                reply = await self._mesh.call(
                    device,
                    Message(PREPARE, {"needed_bytes": needed_bytes}, (blob,)),
                    timeout_seconds=PREPARE_TIMEOUT_SECONDS,
                )
            except (Error, TimeoutError) as error:
                outvoted = isinstance(error, NotCoordinator)
                return _Trouble(name, str(error) or "timed out", outvoted=outvoted)
            if reply.fields.get("ready"):
                return None
            memory_bytes = integer(reply.fields, "memory_bytes")
            log.info("out_of_memory", device=name, needed_bytes=needed_bytes, has=memory_bytes)
            return _Trouble(name, "out of memory", memory_bytes)

        results = await asyncio.gather(*(prepare(device) for device in assignment.devices))
        troubles = [trouble for trouble in results if trouble is not None]
        for trouble in troubles:
            if trouble.outvoted:
                raise NotCoordinator(f"{trouble.name} refused {trouble.reason}")
        return troubles

    def _give_up_if_needed(
        self, failed: Mapping[str, str], holder: str, request: PlanningRequest
    ) -> None:
        for name, reason in failed.items():
            if name == self._name(holder) or request.planner not in ("auto", "pp"):
                raise PlanError(f"{name} could not be made ready: {reason}")


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Why a device could not be made ready.

    Attributes:
        memory_bytes: what it has left for the job, where that is too little; else None.
        outvoted: it follows another coordinator, or this one in another term.
    """

    name: str
    reason: str
    memory_bytes: int | None = None
    outvoted: bool = False

    @property
    def out_of_memory(self) -> bool:
        """Whether it may have a smaller part."""
        return self.memory_bytes is not None


def _without_trouble(candidates: list[Candidate], troubles: list[_Trouble]) -> list[Candidate]:
    """Those that are left, with the memory that they really have."""
    by_name = {trouble.name: trouble for trouble in troubles}
    kept = []
    for candidate in candidates:
        trouble = by_name.get(candidate.name)
        if trouble is None:
            kept.append(candidate)
        elif trouble.out_of_memory:
            kept.append(candidate.with_less_memory(trouble.memory_bytes))
    return kept


def _answer(
    assignment: Assignment, plan: Plan, candidates: list[Candidate], request: PlanningRequest
) -> Message:
    content = {
        **plan.to_json(),
        "changes_results": list(request.sharing.changes(plan)),
        "taken_bytes": {c.name: c.taken_bytes for c in candidates},
    }
    answer = PlanningAnswer(assignment, content)
    return Message(PLAN_REQUEST, {}, (memoryview(answer.to_bytes()),))


def _candidate(device: str, name: str, reply: Message, most_bytes: int | None) -> Candidate:
    """Offering at most what it has proved to have."""
    content = cbor.loads(bytes(reply.parts[0]), BLOB_LIMIT_BYTES) if reply.parts else None
    if not isinstance(content, dict) or not isinstance(content.get("measured"), dict):
        raise ProtocolError(f"{name} sent no profile")
    memory_bytes = content.get("memory_bytes")
    if not isinstance(memory_bytes, int) or memory_bytes < 0:
        raise ProtocolError(f"{name} does not say how much memory it offers")
    most = memory_bytes if most_bytes is None else most_bytes
    taken = integer(content, "taken_bytes")
    return Candidate(device, name, content["measured"], min(memory_bytes, most), taken)


def _speeds(reply: Message) -> list[tuple[str, float, float]]:
    speeds = reply.fields.get("speeds")
    if not isinstance(speeds, list):
        raise ProtocolError("links.measure was answered without speeds")
    checked = []
    for entry in speeds:
        match entry:
            case [str(target), float(rate), float(latency)] if rate > 0 and latency >= 0:
                checked.append((target, rate, latency))
            case _:
                raise ProtocolError("a link's speed is [member, bytes/s, seconds]")
    return checked
