"""Which job this device works for: at most one, and when it gives way to another."""

from __future__ import annotations

import asyncio
from time import monotonic

from p2ptrain.errors import NotItsPart, PeerError
from p2ptrain.logs import get_logger
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
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.net.message import Message
from p2ptrain.recovery.cores.worker_port import HolderState
from p2ptrain.worker.generation_builder import WorkerContext
from p2ptrain.worker.hosted_stages import HostedStages
from p2ptrain.worker.session import WorkerSession

log = get_logger(__name__)

MIN_PARK_SECONDS = 600.0
"""So long a job whose holder is gone keeps its devices from other holders' jobs."""


class JobSlot:
    """Holds this device's part in a job, and answers for it.

    Attributes:
        part: the newest one; it may be over.
        idle: set while there is no job here.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.part: WorkerSession | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self._holder_names: dict[str, str] = {}  # of the last one that ended, by id
        self._unsubscribe = mesh.subscribe(self._on_mesh_event)

    def close(self) -> None:
        """Follow the members no more."""
        self._unsubscribe()

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

    def _on_mesh_event(self, event: MeshEvent) -> None:
        part = self.part
        if part is None:
            return
        if isinstance(event, LinkLost):
            part.link_ended(event.peer_id)
        elif isinstance(event, LinkUp):
            part.link_started(event.peer_id)
        elif isinstance(event, MemberChanged) and event.member.id == part.holder:
            self._holder_names = {event.member.id: event.member.name}
            self._on_holder(part, event.member)

    @staticmethod
    def _on_holder(part: WorkerSession, holder: MeshMember) -> None:
        """That it is alive says nothing: another process may have its place."""
        if holder.state is MemberState.DEAD:
            part.holder_is(HolderState.GONE)
        elif holder.state is MemberState.LEFT:
            part.holder_is(HolderState.LEFT)
