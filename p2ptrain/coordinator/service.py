"""A member's work as planner: it searches plans for the holders of jobs.

Every device can do this. A holder asks the elected coordinator, or a device of its job that is
clearly faster; the same question has the same plan on every device. It keeps nothing of a job,
commands no device, and nothing depends on its answer: a holder that gets none plans by itself. A
search ends when its holder cancels it, asks for another one, or goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from p2ptrain.aio.tasks import run_in_background
from p2ptrain.coordinator.plan_cluster import plan_cluster, replan_cluster
from p2ptrain.coordinator.plan_question import PlanQuestion
from p2ptrain.errors import PeerError
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.calls import CancellableWork, MessageRoute, read_beside
from p2ptrain.messages.kinds import PLAN, PLAN_END
from p2ptrain.messages.requesters import Due
from p2ptrain.net import cbor
from p2ptrain.net.fields import HOUSEHOLD, FrameFields, limited, part_of
from p2ptrain.net.forms import Count
from p2ptrain.net.message import Fields, Message
from p2ptrain.plan.replan.hysteresis import REPAY_SECONDS
from p2ptrain.plan.types.plan import Plan
from p2ptrain.process.child_process import SearchPriority, run_in_child

log = get_logger(__name__)


async def search(question: PlanQuestion, haste: SearchPriority) -> Plan:
    """The plan for a question, found here. Raises PlanError, OptionError."""
    request, household, near = question.request, question.household, question.near
    if near is not None:
        wanted = (request, household, near.plan, near.replicas, near.recovery, REPAY_SECONDS)
        return await run_in_background(partial(replan_cluster, *wanted))
    with timed(log, "plan_searched"):
        return await run_in_child(lambda run: plan_cluster(request, household, run), haste)


@dataclass(frozen=True, slots=True)
class PlanWish(FrameFields):
    """Beside a question, and where its answer is not wanted any more.

    Attributes:
        number: that no other question of the asker has.
        haste: how much training may feel the search.
    """

    number: Count
    haste: SearchPriority


class CoordinatorService:
    """Answers holders' questions."""

    def __init__(self, mesh: Mesh, due: Due) -> None:
        self._due = due
        self._plans = CancellableWork(mesh, "plan")  # by holder
        self._wishes: dict[str, int] = {}  # the newest, by holder
        self._unwanted: dict[str, int] = {}  # given up last, perhaps before it was read, by holder
        mesh.route_now(PLAN_END, self._end)

    @property
    def routes(self) -> Mapping[str, MessageRoute]:
        """What this device answers, by kind."""
        return {PLAN: MessageRoute(self._plan, limited(HOUSEHOLD.most_bytes, due=self._check))}

    async def _plan(self, peer: str, message: Message) -> Message:
        self._due.check_plans_for(peer)
        wish = PlanWish.read(message.fields)
        self._wishes[peer] = wish.number
        question = await read_beside(PlanQuestion.from_bytes, part_of(message))
        if self._unwanted.get(peer) == wish.number:
            raise PeerError("that plan has been given up")
        with self._due.working():
            plan = await self._plans.do(peer, peer, partial(search, question, wish.haste))
        return Message(PLAN, {}, (memoryview(cbor.dumps(plan.to_json())),))

    def _check(self, peer: str, _fields: Fields) -> None:
        self._due.check_plans_for(peer)

    def _end(self, peer: str, message: Message) -> None:
        number = self._unwanted[peer] = PlanWish.read(message.fields).number
        if number == self._wishes.get(peer):
            self._plans.give_up(peer)
