"""The coordinator's work: it makes plans for the holders of jobs.

Every device can do this; the elected one is asked. It keeps nothing of a job, commands no device,
and nothing depends on its answer: a holder that gets none plans by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from p2ptrain.coordinator.cluster_profile import ClusterProfiler
from p2ptrain.coordinator.evaluate_replan import ReplanEvaluation
from p2ptrain.coordinator.plan_question import PlanQuestion, ReplanRequest
from p2ptrain.coordinator.plan_search import PlanSearch
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.calls import CancellableWork, MessageRoute, read_beside
from p2ptrain.messages.kinds import CONSIDER, CONSIDER_END, PLAN, PLAN_END, WORKS
from p2ptrain.messages.requesters import Due
from p2ptrain.net import cbor
from p2ptrain.net.message import Fields, Message
from p2ptrain.net.parts import HOUSEHOLD, LARGE, limited, part_of


class CoordinatorService:
    """Answers holders' questions."""

    def __init__(self, mesh: Mesh, due: Due) -> None:
        self._mesh = mesh
        self._due = due
        self._surveyor = ClusterProfiler(mesh)
        self._search = PlanSearch(mesh, due)
        self._plans = CancellableWork(mesh, "plan")  # by holder
        self._looks = CancellableWork(mesh, "look")  # by holder
        mesh.route_now(CONSIDER_END, self._end_look)  # before the next look of the same holder
        mesh.route_now(PLAN_END, self._end_plan)

    @property
    def routes(self) -> Mapping[str, MessageRoute]:
        """What this device answers, by kind."""
        return {
            **self._search.routes,
            PLAN: MessageRoute(self._plan, limited(HOUSEHOLD.most_bytes, due=self._coordinates)),
            WORKS: MessageRoute(self._works),
            CONSIDER: MessageRoute(
                self._consider, limited(LARGE.most_bytes, due=self._coordinates)
            ),
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
        look = ReplanEvaluation(self._mesh, request, self._surveyor, self._search.plan)
        considered = await self._looks.do(peer, peer, look.answer)
        return Message(CONSIDER, {}, (memoryview(considered.to_bytes()),))

    def _coordinates(self, _peer: str, _fields: Fields) -> None:
        self._due.check_coordinates()

    async def _works(self, peer: str, message: Message) -> Message:
        """Whether anything that the peer has asked for is under way."""
        return Message(WORKS, {"works": self._plans.has(peer) or self._looks.has(peer)})

    def _end_plan(self, peer: str, message: Message) -> None:
        self._plans.give_up(peer)

    def _end_look(self, peer: str, message: Message) -> None:
        self._looks.give_up(peer)
