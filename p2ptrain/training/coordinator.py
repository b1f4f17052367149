"""The coordinator's work: survey the household, plan, and make every device of the plan ready.

Every device can do this; the elected one does. It keeps nothing that the holder and the devices do
not also have, so a newly elected coordinator is ready at once.

    request -> inventories -> links, profiles -> plan -> prepare on every device -> answer
                  ^                                         |
                  +---- without a device that is gone <-----+  or with less memory than it said
"""

from __future__ import annotations

from collections.abc import Mapping

from p2ptrain.errors import NotCoordinator, PeerError
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import MemberState, Mesh
from p2ptrain.net.message import Message
from p2ptrain.training.change_request import ChangeAnswer, ChangeRequest, Refusal, reply_to_bytes
from p2ptrain.training.changing import Change
from p2ptrain.training.consider_request import ConsiderRequest
from p2ptrain.training.considering import Consideration
from p2ptrain.training.parts import limited, part_of
from p2ptrain.training.plan_search import PlanSearch
from p2ptrain.training.protocol import (
    BLOB_LIMIT_BYTES,
    CHANGE,
    CONSIDER,
    CONSIDER_END,
    SURVEY_LINKS,
)
from p2ptrain.training.routes import Route
from p2ptrain.training.surveying import Surveyor
from p2ptrain.training.waiting import unless, within
from p2ptrain.training.wanted_work import WantedWork

log = get_logger(__name__)

ALIVE_TIMEOUT_SECONDS = 10.0


class CoordinatorService:
    """Answers requests for epochs while this device is the coordinator."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._surveyor = Surveyor(mesh)
        self._search = PlanSearch(mesh)
        self._looks = WantedWork(mesh, "look")  # by holder
        mesh.route_now(CONSIDER_END, self._end_look)  # before the next look of the same holder

    @property
    def routes(self) -> Mapping[str, Route]:
        """What this device answers, by kind."""
        return {
            **self._search.routes,
            CHANGE: Route(self._change, limited(BLOB_LIMIT_BYTES)),
            SURVEY_LINKS: Route(self._survey),
            CONSIDER: Route(self._consider, limited(BLOB_LIMIT_BYTES)),
        }

    async def _survey(self, peer: str, message: Message) -> Message:
        """Measure the links ahead of a request, while the holder still exports its model."""
        self._check_in_office()
        await self._surveyor.measure_links([d for d in self._alive() if d != peer])
        return Message(SURVEY_LINKS)

    async def _change(self, peer: str, message: Message) -> Message:
        """Plan and make ready, as long as the term lasts: devices would refuse its orders after."""
        request = ChangeRequest.from_bytes(part_of(message))
        term = self._check_in_office()
        self._looks.give_up(peer)
        work = self._change_in_term(peer, request, term)
        reply = await unless(self._mesh, lambda: not self._in_office(term), work)
        if reply is None:
            raise NotCoordinator(f"{self._mesh.name} does not coordinate any more")
        return Message(CHANGE, {}, (memoryview(reply_to_bytes(reply)),))

    async def _change_in_term(
        self, peer: str, request: ChangeRequest, term: int
    ) -> ChangeAnswer | Refusal:
        await self._seen_alive(peer)
        with timed(log, "epoch_made_ready"):
            change = Change(self._mesh, request, term, self._surveyor, self._search)
            return await change.answer()

    async def _consider(self, peer: str, message: Message) -> Message:
        """Look for a better plan while the job trains, one look a holder at a time.

        An epoch that it asks for meanwhile ends that, its own word does, and its end: its next look
        is not kept waiting by one that it has given up.
        """
        request = ConsiderRequest.from_bytes(part_of(message))
        self._check_in_office()
        look = Consideration(self._mesh, request, self._surveyor, self._search)
        considered = await self._looks.do(peer, peer, look.answer())
        return Message(CONSIDER, {}, (memoryview(considered.to_bytes()),))

    def _end_look(self, peer: str, message: Message) -> None:
        self._looks.give_up(peer)

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
        if not await within(self._mesh, lambda: peer in self._alive(), ALIVE_TIMEOUT_SECONDS):
            raise PeerError(
                f"{self._mesh.name}, which coordinates, does not see this device as alive"
            )

    def _alive(self) -> list[str]:
        members = self._mesh.members.values()
        return sorted(m.id for m in members if m.state is MemberState.ALIVE)
