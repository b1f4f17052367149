"""A job whose holder is gone may have ended meanwhile, while this device was out of reach.

It keeps what it has for the next process of the job's holder, however long that takes. So a holder
writes down which of its jobs have ended, and whatever runs in its state folder says so:

    parked device ── job.over ──► a process of the holder's device, as soon as there is a link to it
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from p2ptrain.errors import Error
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import LinkUp, MemberChanged, Mesh, MeshEvent
from p2ptrain.mesh.state_folder import StateFolder
from p2ptrain.net.message import Message
from p2ptrain.training import ended_jobs
from p2ptrain.training.owned_tasks import OwnedTasks
from p2ptrain.training.protocol import OVER, text
from p2ptrain.training.routes import Route
from p2ptrain.training.service import TrainingService

log = get_logger(__name__)

ASK_TIMEOUT_SECONDS = 10.0


class ParkedJobs:
    """What one device answers about its own jobs, and asks about the one that is parked on it.

    Args:
        folder: where this device's jobs are written down; None = nowhere.
    """

    def __init__(self, mesh: Mesh, service: TrainingService, folder: StateFolder | None) -> None:
        self._mesh = mesh
        self._service = service
        self._folder = folder
        self._tasks = OwnedTasks(_on_failed)
        self._unsubscribe = mesh.subscribe(self._on_mesh_event)

    @property
    def routes(self) -> Mapping[str, Route]:
        """What this device answers, by kind."""
        return {OVER: Route(self._answer)}

    async def close(self) -> None:
        """Ask no more."""
        self._unsubscribe()
        await self._tasks.cancel()

    async def _answer(self, peer: str, message: Message) -> Message:
        job, folder = text(message.fields, "job", 64), self._folder
        ended = () if folder is None else await asyncio.to_thread(ended_jobs.find, folder)
        return Message(OVER, {"over": job in ended})

    def _on_mesh_event(self, event: MeshEvent) -> None:
        parked = self._service.parked
        if parked is None:
            return
        holder, job = parked
        is_sign = isinstance(event, LinkUp) and event.peer_id == holder
        if is_sign or (isinstance(event, MemberChanged) and event.member.id == holder):
            self._tasks.spawn(self._ask(holder, job), "ask whether a job is over")

    async def _ask(self, holder: str, job: str) -> None:
        asked = Message(OVER, {"job": job})
        try:
            reply = await self._mesh.call(holder, asked, timeout_seconds=ASK_TIMEOUT_SECONDS)
        except (Error, TimeoutError) as error:
            log.info("not_known_whether_over", job=job, why=str(error) or "it took too long")
            return
        if reply.fields.get("over") is True and self._service.parked == (holder, job):
            log.info("job_is_over", job=job)
            await self._service.drop(job)


def _on_failed(work: str, error: BaseException) -> None:
    log.error("not_done", work=work, exc_info=error)
