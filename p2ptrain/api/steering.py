"""Pauses, resumes and stops a job from any device of the household.

    any member ── job.steer (run, action) ──► the holder, which does it and says who asked

Members are equals: one that may remove another may pause its training too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from p2ptrain.aio.tasks import TaskOwner
from p2ptrain.errors import PeerError, UserError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh, display_name
from p2ptrain.net.fields import FrameFields
from p2ptrain.net.forms import Id
from p2ptrain.net.message import Message

log = get_logger(__name__)

STEER = "job.steer"

ANSWER_SECONDS = 5.0

Action: TypeAlias = Literal["pause", "resume", "stop"]


@dataclass(frozen=True, slots=True)
class SteerRequest(FrameFields):
    """Of a job that the asked device holds; `run` as in its course."""

    run: Id
    action: Action


class SteeredRun(Protocol):
    """A run of this device: `p2ptrain.Run`."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""

    def pause(self, by: str = "") -> None:
        """Order no further round."""

    def resume(self, by: str = "") -> None:
        """Go on."""

    async def cancel(self, by: str = "") -> None:
        """End it."""


class SteeringDesk:
    """One a member."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._run: tuple[str, SteeredRun] | None = None
        self._tasks = TaskOwner(_failed)
        mesh.route(STEER, self._answer)

    def begin(self, run: str, steered: SteeredRun) -> None:
        """This device trains that run from now on."""
        self._run = run, steered

    async def steer(self, holder: str, asked: SteerRequest) -> None:
        """Ask the device with the data, which may be this one.

        Raises:
            UserError, PeerError: it does not do that, or does not answer.
        """
        if holder == self._mesh.self_id:
            self._do(asked, self._mesh.name)
            return
        question = Message(STEER, asked.fields())
        try:
            await self._mesh.call(holder, question, timeout_seconds=ANSWER_SECONDS)
        except TimeoutError as error:
            raise PeerError(f"{display_name(self._mesh, holder)} does not answer") from error

    async def close(self) -> None:
        """Begin nothing more; a run that is being stopped is its owner's."""
        await self._tasks.cancel()

    async def _answer(self, peer: str, message: Message) -> Message:
        try:
            self._do(SteerRequest.read(message.fields), display_name(self._mesh, peer))
        except UserError as error:
            raise PeerError(str(error)) from error
        return Message(STEER, {})

    def _do(self, asked: SteerRequest, by: str) -> None:
        if self._run is None or self._run[0] != asked.run or self._run[1].done:
            raise UserError(f"that training has ended on {self._mesh.name}: look again")
        run = self._run[1]
        log.info("job_steered", action=asked.action, by=by)
        match asked.action:
            case "pause":
                run.pause(by)
            case "resume":
                run.resume(by)
            case "stop":  # in a task: it takes as long as the devices' letting go
                self._tasks.spawn(run.cancel(by), "stop the job")


def _failed(name: str, error: BaseException) -> None:
    log.warning("not_steered", task=name, why=str(error) or type(error).__name__)
