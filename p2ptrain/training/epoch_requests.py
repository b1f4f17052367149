"""A holder's requests for epochs, and what came of the newest one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p2ptrain import failpoints
from p2ptrain.errors import Error, PeerError, PlanError
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import Mesh
from p2ptrain.training.assigning import placed_of
from p2ptrain.training.change_request import ChangeAnswer, ChangeRequest
from p2ptrain.training.changing import Change
from p2ptrain.training.job_reports import JobReports
from p2ptrain.training.patience import Hangs
from p2ptrain.training.planner import Planner
from p2ptrain.training.recovery import holder_events as rules
from p2ptrain.training.recovery.no_way import NoWay
from p2ptrain.training.surveying import Surveyor

log = get_logger(__name__)


class EpochRequests:
    """See the module.

    Args:
        unit_names: of the model's units, for people.
        post: tells the rules what has come.
        in_force: the number of the epoch that the rules hold to be in force, 0 before the first.
        hangs: is called for a device that does not do what it is asked for.

    Attributes:
        answer: the one that is in force, or that the rules are about to accept; None before.
    """

    def __init__(
        self,
        mesh: Mesh,
        unit_names: Sequence[str],
        reports: JobReports,
        post: Callable[[rules.HolderEvent], None],
        in_force: Callable[[], int],
        surveyor: Surveyor,
        planner: Planner,
        hangs: Callable[[Hangs], None],
    ) -> None:
        self.answer: ChangeAnswer | None = None
        self._mesh = mesh
        self._unit_names = unit_names
        self._reports = reports
        self._post = post
        self._in_force = in_force
        self._surveyor = surveyor
        self._planner = planner
        self._hangs = hangs
        self._refusal: NoWay | None = None
        self._told = ""  # why people were told that nothing begins

    async def ask(self, request: ChangeRequest) -> None:
        """Have an epoch made ready, and tell the rules."""
        number = request.ask.number
        with timed(log, "epoch_made_ready"):
            change = Change(self._mesh, request, self._surveyor, self._planner, self._hangs)
            reply = await change.answer()
        if isinstance(reply, NoWay):
            self._tell(reply)
            self._refusal = reply
            self._post(reply)
            return
        if failpoints.armed:
            await failpoints.reach("accept.before", device=self._mesh.self_id)
        self._take(reply, number)

    def _tell(self, refusal: NoWay) -> None:
        """A reason that stays, such as another job, is people's to know: it may stay for hours."""
        last = self._refusal
        stays = refusal.again and last is not None and last.reason == refusal.reason
        if stays and self._told != refusal.reason:
            self._told = refusal.reason
            self._reports.warn(f"this job waits, and asks again: {refusal.reason}")

    def error(self, reason: str) -> Error:
        """What the job ends with, for people, where the rules say that it does."""
        refusal = self._refusal
        lost = None if refusal is None else refusal.lost
        if refusal is not None and refusal.is_plan:
            return PlanError(reason)
        if lost is not None:
            first, last = (self._unit_names[unit] for unit in (lost.units[0], lost.units[-1]))
            layers = first if first == last else f"{first} to {last}"
            return self._reports.lost(reason, lost.last_places, layers)
        return PeerError(reason)

    def _take(self, reply: ChangeAnswer, number: int) -> None:
        # The rules may refuse it; then the plan in force stays the old one.
        old, self.answer = self.answer, reply
        self._post(rules.AnswerIn(number, placed_of(reply.assignment), reply.choice))
        if self._in_force() != reply.assignment.key.epoch:
            self.answer = old
        else:
            self._refusal = None
