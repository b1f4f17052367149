"""A device that leaves hands its work over first, so that nothing is computed again.

    job.leaving ──► holder: the round ends, a plan without this device, others fetch its state
                ◄── answered when nothing depends on this device any more; or that no plan fits
                    without it: then it waits for the job's end, for a limited time

The job of a dead holder may have ended while this device was out of reach. This device keeps its
state for the holder's next process, however long that takes. So a holder writes down which of its
jobs have ended, and any process of its state folder answers:

    orphaned job ── job.over ──► a process of the holder's device, as soon as there is a link to it
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import monotonic

from p2ptrain import failpoints
from p2ptrain.aio.tasks import TaskOwner
from p2ptrain.errors import Error
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.interface import LinkUp, MemberChanged, Mesh, MeshEvent
from p2ptrain.messages.calls import MessageRoute
from p2ptrain.messages.job_requests import JobOver, JobQuestion, LeaveReply
from p2ptrain.messages.kinds import LEAVING, OVER
from p2ptrain.net.message import Message
from p2ptrain.state import ended_jobs
from p2ptrain.worker.service import WorkerService

log = get_logger(__name__)


async def hand_over(
    mesh: Mesh, service: WorkerService, seconds: float, warn: Callable[[str], None]
) -> None:
    """Ask the holder of the job that this device works for, if any, to do without it.

    Whatever comes of it, this device may leave afterwards: at worst the others take it for dead.

    Args:
        seconds: longest wait.
        warn: warns the user that the others cannot do without this device.
    """
    until = monotonic() + seconds
    try:
        why = await ask_to_leave(mesh, service, seconds)
        if why is None:
            return
        left = max(until - monotonic(), 0.0)
        warn(
            f"the others cannot take over this device's work ({why}). Leaving in {left:.0f} s at "
            "most; press Ctrl-C again to leave now and break the training"
        )
        async with asyncio.timeout(left):
            await service.slot.idle.wait()
    except (Error, TimeoutError) as error:
        log.info("not_handed_over", why=str(error) or f"it took more than {seconds:.0f} s")


async def ask_to_leave(mesh: Mesh, service: WorkerService, seconds: float) -> str | None:
    """Have the work of this device handed over; returns why the others cannot do without it.

    None: nothing depends on this device any more.

    Raises:
        Error: the holder is out of reach, or the job is over.
        TimeoutError: the holder has not answered in time.
    """
    job, holder = service.slot.job, service.slot.holder
    if job is None or holder is None or holder == mesh.self_id:
        return None
    await failpoints.reach("leave.ask.before", device=mesh.self_id)
    with timed(log, "handed_over"):
        asked = Message(LEAVING, JobQuestion(job).fields())
        reply = await mesh.call(holder, asked, timeout_seconds=seconds)
    return LeaveReply.read(reply.fields).refused


ASK_TIMEOUT_SECONDS = 10.0


class OrphanedJobs:
    """What one device answers about its own jobs, and asks about the one that is orphaned on it.

    Args:
        folder: where this device's jobs are written down; None = nowhere.
    """

    def __init__(self, mesh: Mesh, service: WorkerService, folder: StateFolder | None) -> None:
        self._mesh = mesh
        self._service = service
        self._folder = folder
        self._tasks = TaskOwner()
        self._unsubscribe = mesh.subscribe(self._on_mesh_event)

    @property
    def routes(self) -> Mapping[str, MessageRoute]:
        """What this device answers, by kind."""
        return {OVER: MessageRoute(self._answer)}

    async def close(self) -> None:
        """Ask no more."""
        self._unsubscribe()
        await self._tasks.cancel()

    async def _answer(self, peer: str, message: Message) -> Message:
        job, folder = JobQuestion.read(message.fields).job, self._folder
        ended = () if folder is None else await asyncio.to_thread(ended_jobs.find_ended, folder)
        return Message(OVER, JobOver(job in ended).fields())

    def _on_mesh_event(self, event: MeshEvent) -> None:
        orphaned = self._service.slot.orphaned
        if orphaned is None:
            return
        holder, job = orphaned
        is_sign = isinstance(event, LinkUp) and event.peer_id == holder
        if is_sign or (
            isinstance(event, MemberChanged) and event.member.id == holder and not event.described
        ):
            self._tasks.spawn(self._ask(holder, job), "ask whether a job is over")

    async def _ask(self, holder: str, job: str) -> None:
        asked = Message(OVER, JobQuestion(job).fields())
        try:
            reply = await self._mesh.call(holder, asked, timeout_seconds=ASK_TIMEOUT_SECONDS)
        except (Error, TimeoutError) as error:
            log.info("not_known_whether_over", job=job, why=str(error) or "it took too long")
            return
        if reply.fields.get("over") is True and self._service.slot.orphaned == (holder, job):
            log.info("job_is_over", job=job)
            await self._service.slot.drop(job)
