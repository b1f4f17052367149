"""Which job this device works for: at most one; when it gives way to another, and how it leaves.

A device that leaves hands its work over first, so that nothing is computed again.

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
from collections.abc import Callable
from time import monotonic

from p2ptrain import failpoints
from p2ptrain.aio.tasks import TaskOwner
from p2ptrain.errors import Error, NotItsPart, PeerError
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.interface import (
    LinkLost,
    LinkUp,
    MemberChanged,
    MemberState,
    Mesh,
    MeshEvent,
    MeshMember,
    display_name,
)
from p2ptrain.messages.job_requests import JobOver, JobQuestion, LeaveReply
from p2ptrain.messages.kinds import LEAVING, OVER
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.net.message import Message
from p2ptrain.recovery.cores.worker_port import HolderState
from p2ptrain.state import ended_jobs
from p2ptrain.worker.generation_builder import WorkerContext
from p2ptrain.worker.hosted_stages import HostedStages
from p2ptrain.worker.session import WorkerSession

log = get_logger(__name__)

MIN_PARK_SECONDS = 600.0
"""So long a job whose holder is gone keeps its devices from other holders' jobs."""

ASK_TIMEOUT_SECONDS = 10.0


class JobSlot:
    """Holds this device's part in a job, and answers for it.

    Args:
        jobs: where this device's own jobs are written down; None = nowhere.

    Attributes:
        part: the newest one; it may be over.
        idle: set while there is no job here.
    """

    def __init__(self, mesh: Mesh, jobs: StateFolder | None = None) -> None:
        self._mesh = mesh
        self._jobs = jobs
        self._tasks = TaskOwner()
        self.part: WorkerSession | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self._holder_names: dict[str, str] = {}  # of the last one that ended, by id
        self._unsubscribe = mesh.subscribe(self._on_mesh_event)

    async def close(self) -> None:
        """Follow the members no more, and leave the current job."""
        self._unsubscribe()
        await self._tasks.cancel()
        await self.drop()

    def take(self, job: str, context: WorkerContext) -> WorkerSession:
        """The part in `job`, a new one where this device has none."""
        if self.part is None or self.part.job != job:
            self.part = WorkerSession(job, context)
        return self.part

    def on_change(self) -> None:
        """Whatever has happened to the part."""
        if self.part is not None and self.part.is_busy:
            self.idle.clear()
        else:
            self.idle.set()

    @property
    def job(self) -> str | None:
        """The job this device works for."""
        return self.part.job if self.part is not None and self.part.is_busy else None

    @property
    def hosted(self) -> HostedStages | None:
        """The stages that this device has, if any."""
        return self.part.hosted if self.part is not None else None

    @property
    def holder(self) -> str | None:
        """Id of the device whose job this is."""
        return self.part.holder if self.part is not None and self.part.is_busy else None

    @property
    def holder_name(self) -> str | None:
        """Of the job this device works for; None too where that one gives way to another."""
        part = self.part
        if part is None or not part.is_busy or part.holder is None or self._gives_way(part):
            return None
        return self.name(part.holder)

    @property
    def orphaned(self) -> tuple[str, str] | None:
        """Holder and job, where that holder's process has ended and what is here is kept for it."""
        part = self.part
        if part is None or not part.is_busy or part.holder is None or part.alone_since is None:
            return None
        return part.holder, part.job

    @property
    def waiting_for(self) -> str | None:
        """Name of the holder whose end this device's job outlives, keeping what it has."""
        return None if self.orphaned is None else self.name(self.orphaned[0])

    def name(self, device: str) -> str:
        """A member's name, also of a holder that was removed since."""
        known = None if device in self._mesh.members else self._holder_names.get(device)
        return known or display_name(self._mesh, device)

    async def drop(self, job: str | None = None) -> None:
        """Leave the current job, if any; with `job`, only if it is that one."""
        part = self.part
        if part is None or job not in (None, part.job):
            return
        log.info("job_dropped", job=part.job)
        await part.close()

    async def make_way(self, job: str) -> None:
        """Raises PeerError: this device works for another job, and that one does not give way."""
        part = self.part
        if part is None or part.job == job:
            return
        if not part.is_over and not self._gives_way(part):
            whose = "" if part.holder is None else f", that of {self.name(part.holder)}"
            raise PeerError(f"{self._mesh.name} already computes for another training{whose}")
        await self.drop()

    def _gives_way(self, part: WorkerSession) -> bool:
        """Whether another holder's job goes before this one.

        Its holder has been gone for long, or was removed from the household: that one cannot even
        come back to end it. Or it has never begun.
        """
        if part.has_expired(monotonic()):
            return True
        if part.alone_since is None:
            return False
        is_old = monotonic() - part.alone_since >= MIN_PARK_SECONDS
        return is_old or part.holder not in self._mesh.members

    def part_in(self, job: str, peer: str, message: Message) -> WorkerSession | None:
        """This device's part in that job, if it has one. Raises NotItsPart."""
        part = self.part
        if part is None or part.job != job:
            return None
        if peer != part.holder:
            raise NotItsPart(f"{message.kind} from a device that is not the holder")
        return part

    def engaged(self, peer: str, message: Message) -> HostedStages | None:
        """The part that a holder's message is for, or None if it is over. Refuses strangers."""
        key = GenerationKey.read(message.fields)
        hosted = self.hosted
        if hosted is None or hosted.assignment.key != key:
            return None
        if peer != hosted.assignment.holder:
            raise NotItsPart(f"{message.kind} from a device that is not the holder")
        return hosted

    def standing(self, peer: str, message: Message) -> HostedStages:
        """As `engaged`. Raises PeerError: it is over."""
        hosted = self.engaged(peer, message)
        if hosted is None:
            raise PeerError("that generation is over")
        return hosted

    # -- leaving ---------------------------------------------------------------------------------

    async def hand_over(self, seconds: float, warn: Callable[[str], None]) -> None:
        """Ask the holder of the job that this device works for, if any, to do without it.

        Whatever comes of it, this device may leave afterwards: at worst the others take it for
        dead.

        Args:
            seconds: longest wait.
            warn: warns the user that the others cannot do without this device.
        """
        until = monotonic() + seconds
        try:
            why = await self.ask_to_leave(seconds)
            if why is None:
                return
            left = max(until - monotonic(), 0.0)
            warn(
                f"the others cannot take over this device's work ({why}). Leaving in {left:.0f} s "
                "at most; press Ctrl-C again to leave now and break the training"
            )
            async with asyncio.timeout(left):
                await self.idle.wait()
        except (Error, TimeoutError) as error:
            log.info("not_handed_over", why=str(error) or f"it took more than {seconds:.0f} s")

    async def ask_to_leave(self, seconds: float) -> str | None:
        """Have the work of this device handed over; returns why the others cannot do without it.

        None: nothing depends on this device any more.

        Raises:
            Error: the holder is out of reach, or the job is over.
            TimeoutError: the holder has not answered in time.
        """
        job, holder, me = self.job, self.holder, self._mesh.self_id
        if job is None or holder is None or holder == me:
            return None
        await failpoints.reach("leave.ask.before", device=me)
        with timed(log, "handed_over"):
            asked = Message(LEAVING, JobQuestion(job).fields())
            reply = await self._mesh.call(holder, asked, timeout_seconds=seconds)
        return LeaveReply.read(reply.fields).refused

    # -- orphaned jobs ---------------------------------------------------------------------------

    async def say_whether_over(self, peer: str, message: Message) -> Message:
        """Of a job of this device's own."""
        job, folder = JobQuestion.read(message.fields).job, self._jobs
        ended = () if folder is None else await asyncio.to_thread(ended_jobs.find_ended, folder)
        return Message(OVER, JobOver(job in ended).fields())

    async def _ask_whether_over(self, holder: str, job: str) -> None:
        asked = Message(OVER, JobQuestion(job).fields())
        try:
            reply = await self._mesh.call(holder, asked, timeout_seconds=ASK_TIMEOUT_SECONDS)
        except (Error, TimeoutError) as error:
            log.info("not_known_whether_over", job=job, why=str(error) or "it took too long")
            return
        if reply.fields.get("over") is True and self.orphaned == (holder, job):
            log.info("job_is_over", job=job)
            await self.drop(job)

    def _on_mesh_event(self, event: MeshEvent) -> None:
        part = self.part
        if part is None:
            return
        match event:
            case LinkLost(peer):
                part.core.link_ended(peer)
            case LinkUp(peer):
                part.core.link_started(peer)
                self._ask_where_orphaned(peer)
            case MemberChanged(member) if member.id == part.holder:
                self._holder_names = {member.id: member.name}
                self._on_holder(part, member)
                if not event.described:
                    self._ask_where_orphaned(member.id)

    def _ask_where_orphaned(self, holder: str) -> None:
        if self.orphaned is not None and self.orphaned[0] == holder:
            self._tasks.spawn(self._ask_whether_over(*self.orphaned), "ask whether a job is over")

    @staticmethod
    def _on_holder(part: WorkerSession, holder: MeshMember) -> None:
        """That it is alive says nothing: another process may have its place."""
        if holder.state is MemberState.DEAD:
            part.holder_is(HolderState.GONE)
        elif holder.state is MemberState.LEFT:
            part.holder_is(HolderState.LEFT)
