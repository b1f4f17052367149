"""The coordinator's work: it makes plans for the holders of jobs, searched where that is fastest.

Every device can do this; the elected one is asked. It keeps nothing of a job, commands no device,
and nothing depends on its answer: a holder that gets none plans by itself.

The election decides which device coordinates, not its speed, so a much faster one may be asked to
search. The same question has the same plan on every device. If that one does not answer in time,
the asker searches too and the first plan counts. A search ends when the asker cancels it, or goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from typing import TypeVar

from p2ptrain.aio.threads import run_in_background
from p2ptrain.coordinator.cluster_profile import ClusterProfiler
from p2ptrain.coordinator.evaluate_replan import ReplanEvaluation
from p2ptrain.coordinator.measured_cluster import MeasuredCluster, MeasuredDevice, overheads_of
from p2ptrain.coordinator.plan_cluster import plan_cluster, replan_cluster
from p2ptrain.coordinator.plan_question import PlanQuestion, ReplanRequest
from p2ptrain.errors import Error
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.calls import CancellableWork, MessageRoute, cancel_remote_work, read_beside
from p2ptrain.messages.kinds import (
    PLAN,
    PLAN_END,
    REPLAN,
    REPLAN_END,
    SEARCH_END,
    SEARCH_PLAN,
    WORKS,
)
from p2ptrain.messages.requesters import Due
from p2ptrain.net import cbor
from p2ptrain.net.fields import FrameFields
from p2ptrain.net.forms import Count
from p2ptrain.net.message import Fields, Message
from p2ptrain.net.parts import HOUSEHOLD, LARGE, limited, part_of
from p2ptrain.plan.replan.hysteresis import REPAY_SECONDS
from p2ptrain.plan.types.plan import Plan
from p2ptrain.process.child_process import SearchPriority, run_in_child

log = get_logger(__name__)

T = TypeVar("T")

TIMEOUT_SECONDS = 120.0

IDLE_TIMEOUT_SECONDS = 1200.0

HEAD_START_SECONDS = 5.0
"""So long another device may search alone while the user waits for the plan."""

WORTH_ASKING = 1.25
"""How many times as fast another device must be."""


async def search(question: PlanQuestion, haste: SearchPriority) -> Plan:
    """The plan for a question, found here. Raises PlanError, OptionError."""
    request, household, near = question.request, question.household, question.near
    if near is not None:
        wanted = (request, household, near.plan, near.replicas, near.recovery, REPAY_SECONDS)
        return await run_in_background(partial(replan_cluster, *wanted))
    with timed(log, "plan_searched"):
        return await run_in_child(lambda run: plan_cluster(request, household, run), haste)


@dataclass(frozen=True, slots=True)
class _SearchEnd(FrameFields):
    search: Count


@dataclass(frozen=True, slots=True)
class _SearchFields(FrameFields):
    """A search by its number, and how much training may feel it."""

    search: Count
    haste: SearchPriority


class PlanSearch:
    """Searches here, or asks a faster device to."""

    def __init__(
        self, mesh: Mesh, due: Due, head_start_seconds: float = HEAD_START_SECONDS
    ) -> None:
        self._mesh = mesh
        self._due = due
        self._head_start_seconds = head_start_seconds
        self._numbers = count(1)
        self._searches = CancellableWork(mesh, "search")  # by asker and its number
        mesh.route_now(SEARCH_END, self._end)

    @property
    def routes(self) -> Mapping[str, MessageRoute]:
        """What this device answers, by kind."""
        parts = limited(HOUSEHOLD.most_bytes, due=self._in_charge)
        return {SEARCH_PLAN: MessageRoute(self._answer, parts)}

    async def plan(
        self, question: PlanQuestion, haste: SearchPriority = SearchPriority.ALONE
    ) -> Plan:
        """As `search`, which says what it raises."""
        searcher = fastest(question.household, self._mesh.self_id)
        if (
            searcher == self._mesh.self_id or question.near is not None
        ):  # what is near is soon found
            return await search(question, haste)
        return await first_of(
            lambda: self._ask(searcher, question, haste),
            lambda: search(question, haste),
            inf if haste is SearchPriority.IDLE else self._head_start_seconds,
        )

    async def _ask(
        self, searcher: str, question: PlanQuestion, haste: SearchPriority
    ) -> Plan | None:
        asked = _SearchFields(next(self._numbers), haste)
        try:
            reply = await self._mesh.call(
                searcher,
                Message(SEARCH_PLAN, asked.fields(), (memoryview(question.to_bytes()),)),
                timeout_seconds=IDLE_TIMEOUT_SECONDS
                if haste is SearchPriority.IDLE
                else TIMEOUT_SECONDS,
                reply_parts=limited(LARGE.most_bytes),
            )
            return await read_beside(question.answered, part_of(reply))
        except (Error, TimeoutError) as error:  # that no plan fits is found here too
            log.info("plan_not_searched", by=searcher[:12], why=str(error) or "timed out")
            if isinstance(error, TimeoutError):
                await self._unwanted(searcher, asked.search)
            return None
        except asyncio.CancelledError:
            await self._unwanted(searcher, asked.search)
            raise

    async def _unwanted(self, searcher: str, number: int) -> None:
        message = Message(SEARCH_END, _SearchEnd(number).fields())
        await cancel_remote_work(self._mesh, searcher, message)

    async def _answer(self, peer: str, message: Message) -> Message:
        self._due.check_in_charge(peer)
        self._due.check_job_of(peer)
        question = await read_beside(PlanQuestion.from_bytes, part_of(message))
        asked = _SearchFields.read(message.fields)
        run = partial(search, question, asked.haste)
        plan = await self._searches.do((peer, asked.search), peer, run)
        return Message(SEARCH_PLAN, {}, (memoryview(cbor.dumps(plan.to_json())),))

    def _in_charge(self, peer: str, _fields: Fields) -> None:
        self._due.check_in_charge(peer)

    def _end(self, peer: str, message: Message) -> None:
        self._searches.give_up((peer, _SearchEnd.read(message.fields).search))


async def first_of(
    asked: Callable[[], Awaitable[T | None]],
    here: Callable[[], Awaitable[T]],
    head_start_seconds: float,
) -> T:
    """What another device answers; what is found here where that is of no use, or not there soon.

    Raises what `here` raises. `asked` raises nothing.
    """
    other = asyncio.ensure_future(asked())
    own: asyncio.Future[T] | None = None
    try:
        limit = None if head_start_seconds == inf else head_start_seconds
        await asyncio.wait([other], timeout=limit)
        if not other.done():
            own = asyncio.ensure_future(here())
            await asyncio.wait([other, own], return_when=asyncio.FIRST_COMPLETED)
        if other.done() and (found := other.result()) is not None:
            return found
        return await (own if own is not None else here())
    finally:
        other.cancel()
        if own is not None:
            own.cancel()
        await asyncio.gather(*([other] if own is None else [other, own]), return_exceptions=True)


def fastest(household: MeasuredCluster, here: str) -> str:
    """The id of the device that is best asked: `here` unless another is clearly faster.

    By what a message costs there: that is Python's work, as the search is.
    """
    seconds = {candidate.id: _message_seconds(candidate) for candidate in household.candidates}
    best = min(sorted(seconds), key=seconds.__getitem__)
    return best if WORTH_ASKING * seconds[best] < seconds.get(here, 0.0) else here


def _message_seconds(candidate: MeasuredDevice) -> float:
    overheads = overheads_of(candidate)
    return inf if overheads is None else overheads.message_seconds


class CoordinatorService:
    """Answers holders' questions."""

    def __init__(self, mesh: Mesh, due: Due) -> None:
        self._mesh = mesh
        self._due = due
        self._profiler = ClusterProfiler(mesh)
        self._search = PlanSearch(mesh, due)
        self._plans = CancellableWork(mesh, "plan")  # by holder
        self._looks = CancellableWork(mesh, "look")  # by holder
        mesh.route_now(REPLAN_END, self._end_look)  # before the next look of the same holder
        mesh.route_now(PLAN_END, self._end_plan)

    @property
    def routes(self) -> Mapping[str, MessageRoute]:
        """What this device answers, by kind."""
        return {
            **self._search.routes,
            PLAN: MessageRoute(self._plan, limited(HOUSEHOLD.most_bytes, due=self._coordinates)),
            WORKS: MessageRoute(self._works),
            REPLAN: MessageRoute(self._consider, limited(LARGE.most_bytes, due=self._coordinates)),
        }

    async def _plan(self, peer: str, message: Message) -> Message:
        """Plan for a holder that waits: what it looked for while it trained is not wanted then."""
        self._due.check_coordinates()
        question = await read_beside(PlanQuestion.from_bytes, part_of(message))
        self._looks.give_up(peer)
        plan = await self._plans.do(peer, peer, partial(self._search.plan, question))
        return Message(PLAN, {}, (memoryview(cbor.dumps(plan.to_json())),))

    async def _consider(self, peer: str, message: Message) -> Message:
        """Look for a better plan while the job trains, one look a holder at a time.

        A plan that it asks for meanwhile ends that, its own word does, and its end: its next look
        is not kept waiting by one that it has given up.
        """
        self._due.check_coordinates()
        request = await read_beside(ReplanRequest.from_bytes, part_of(message))
        look = ReplanEvaluation(self._mesh, request, self._profiler, self._search.plan)
        considered = await self._looks.do(peer, peer, look.answer)
        return Message(REPLAN, {}, (memoryview(considered.to_bytes()),))

    def _coordinates(self, _peer: str, _fields: Fields) -> None:
        self._due.check_coordinates()

    async def _works(self, peer: str, message: Message) -> Message:
        """Whether anything that the peer has asked for is under way."""
        return Message(WORKS, {"works": self._plans.has(peer) or self._looks.has(peer)})

    def _end_plan(self, peer: str, message: Message) -> None:
        self._plans.give_up(peer)

    def _end_look(self, peer: str, message: Message) -> None:
        self._looks.give_up(peer)
