"""Where the search for a plan runs: on the fastest device, where everyone waits for it.

Who coordinates is a matter of the election, not of speed. Wherever it runs, the same question has
the same plan; a device that does not answer costs time only, as the coordinator searches itself.
A search ends with the wish for it: where whoever asked says so, or is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import count
from math import inf

from p2ptrain.errors import InternalError, OptionError, PeerError, ProtocolError
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import Mesh
from p2ptrain.net import cbor
from p2ptrain.net.message import Message
from p2ptrain.plan.cluster import Link
from p2ptrain.plan.plan import Plan
from p2ptrain.training.apart import Haste, apart
from p2ptrain.training.household_plan import (
    Candidate,
    MeasuredHousehold,
    overheads_of,
    plan_household,
)
from p2ptrain.training.parts import limited, part_of
from p2ptrain.training.plan_request import PlanningRequest
from p2ptrain.training.protocol import BLOB_LIMIT_BYTES, SEARCH_END, SEARCH_PLAN, integer, text
from p2ptrain.training.routes import Route
from p2ptrain.training.wanted_work import WantedWork, say_unwanted

log = get_logger(__name__)

TIMEOUT_SECONDS = 120.0
IDLE_TIMEOUT_SECONDS = 1200.0
WORTH_ASKING = 1.25
"""How many times as fast another device must be."""


class PlanSearch:
    """Searches here, or asks a faster device to."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._numbers = count(1)
        self._searches = WantedWork(mesh, "search")  # by asker and its number
        mesh.route_now(SEARCH_END, self._end)

    @property
    def routes(self) -> Mapping[str, Route]:
        """What this device answers, by kind."""
        return {SEARCH_PLAN: Route(self._answer, limited(BLOB_LIMIT_BYTES))}

    async def plan(
        self, request: PlanningRequest, household: MeasuredHousehold, haste: Haste = Haste.ALONE
    ) -> Plan:
        """As `plan_household`, which says what it raises."""
        searcher = fastest(household, self._mesh.self_id)
        if searcher != self._mesh.self_id:
            try:
                return await self._ask(searcher, request, household, haste)
            except (PeerError, InternalError, OptionError, TimeoutError) as error:
                log.info("plan_not_searched", by=searcher[:12], why=str(error) or "timed out")
        return await _search(request, household, haste)

    async def _ask(
        self, searcher: str, request: PlanningRequest, household: MeasuredHousehold, haste: Haste
    ) -> Plan:
        fields = {"haste": haste.value, "search": next(self._numbers)}
        try:
            reply = await self._mesh.call(
                searcher,
                Message(SEARCH_PLAN, fields, (memoryview(to_bytes(request, household)),)),
                timeout_seconds=IDLE_TIMEOUT_SECONDS if haste is Haste.IDLE else TIMEOUT_SECONDS,
                reply_parts=limited(BLOB_LIMIT_BYTES),
            )
        except (asyncio.CancelledError, TimeoutError):
            message = Message(SEARCH_END, {"search": fields["search"]})
            await say_unwanted(self._mesh, searcher, message)
            raise
        return _checked(cbor.loads(bytes(part_of(reply)), BLOB_LIMIT_BYTES), request, household)

    async def _answer(self, peer: str, message: Message) -> Message:
        request, household = from_bytes(part_of(message))
        haste = Haste(integer(message.fields, "haste", min(Haste), max(Haste)))
        key = peer, integer(message.fields, "search")
        plan = await self._searches.do(key, peer, _search(request, household, haste))
        return Message(SEARCH_PLAN, {}, (memoryview(cbor.dumps(plan.to_json())),))

    def _end(self, peer: str, message: Message) -> None:
        self._searches.give_up((peer, integer(message.fields, "search")))


async def _search(request: PlanningRequest, household: MeasuredHousehold, haste: Haste) -> Plan:
    with timed(log, "plan_searched"):
        return await apart(lambda run: plan_household(request, household, run), haste)


def fastest(household: MeasuredHousehold, here: str) -> str:
    """The id of the device that is best asked: `here` unless another is clearly faster.

    By what a message costs there: that is Python's work, as the search is.
    """
    seconds = {candidate.id: _message_seconds(candidate) for candidate in household.candidates}
    best = min(sorted(seconds), key=seconds.__getitem__)
    return best if WORTH_ASKING * seconds[best] < seconds.get(here, 0.0) else here


def _message_seconds(candidate: Candidate) -> float:
    overheads = overheads_of(candidate)
    return inf if overheads is None else overheads.message_seconds


def _checked(value: object, request: PlanningRequest, household: MeasuredHousehold) -> Plan:
    """Another device's plan. Raises OptionError, ProtocolError."""
    plan = Plan.from_json(value, batch_size=request.batch_size)
    here = {candidate.name for candidate in household.candidates}
    used = plan.device_names
    if not used <= here or here - used != {out.name for out in plan.left_out}:
        raise ProtocolError("a plan of other devices than those it was asked for")
    if not used <= plan.predicted.peak_bytes.keys():
        raise ProtocolError("a plan that does not say how much memory it takes")
    return plan


def to_bytes(request: PlanningRequest, household: MeasuredHousehold) -> bytes:
    """A question, as strict CBOR."""
    return cbor.dumps(
        {
            "request": request.to_bytes(),
            "holder": household.holder,
            "leaving": sorted(household.leaving),
            "links": [
                [sender, receiver, float(link.bytes_per_s), float(link.latency_s)]
                for (sender, receiver), link in household.links.items()
            ],
            "candidates": [
                {
                    "id": candidate.id,
                    "name": candidate.name,
                    "measured": dict(candidate.measured),
                    "memory_bytes": candidate.memory_bytes,
                    "taken_bytes": candidate.taken_bytes,
                }
                for candidate in household.candidates
            ],
        }
    )


def from_bytes(data: bytes | memoryview) -> tuple[PlanningRequest, MeasuredHousehold]:
    """Check and read. Raises ProtocolError; profiles are checked where they are planned with."""
    fields = cbor.loads(bytes(data), BLOB_LIMIT_BYTES)
    match fields:
        case {
            "request": bytes(request),
            "links": [*links],
            "candidates": [*candidates],
            "leaving": [*leaving],
        } if all(isinstance(name, str) for name in leaving):
            household = MeasuredHousehold(
                candidates=[_candidate(candidate) for candidate in candidates],
                links=dict(_link(link) for link in links),
                holder=text(fields, "holder"),
                leaving=frozenset(leaving),
            )
            if household.holder not in {candidate.name for candidate in household.candidates}:
                raise ProtocolError("a question whose holder is no candidate")
            return PlanningRequest.from_bytes(request), household
    raise ProtocolError("a question for a plan holds a request, links and candidates")


def _candidate(fields: object) -> Candidate:
    if not isinstance(fields, dict) or not isinstance(fields.get("measured"), dict):
        raise ProtocolError("a candidate without a profile")
    return Candidate(
        id=text(fields, "id"),
        name=text(fields, "name"),
        measured=fields["measured"],
        memory_bytes=integer(fields, "memory_bytes", 0, 2**63),
        taken_bytes=integer(fields, "taken_bytes", 0, 2**63),
    )


def _link(value: object) -> tuple[tuple[str, str], Link]:
    match value:
        case [str(sender), str(receiver), float(rate), float(latency)] if rate > 0 <= latency:
            return (sender, receiver), Link(rate, latency)
    raise ProtocolError("a link is [name, name, bytes/s, seconds]")
