"""A household in one process and one event loop, without sockets.

`--local` runs on a household of one; tests run on as many devices as they like. What leaves a
device is really encoded, decoded and copied into the receiver's buffers, so that whatever works
here has passed the same limits and the same allocators as on a network. Membership and election
are decided from outside (`kill`, `leave`, `elect`): a test says what happens and when.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Self

from p2ptrain.errors import InternalError, LinkClosed, ProtocolError
from p2ptrain.logs import get_logger
from p2ptrain.mesh import probe
from p2ptrain.mesh.interface import (
    Coordinator,
    CoordinatorChanged,
    Handler,
    LinkLost,
    LinkSpeed,
    LinkStatistics,
    Member,
    MemberChanged,
    MemberState,
    MeshEvent,
    Take,
)
from p2ptrain.mesh.router import Router
from p2ptrain.net.header import decode_header, encode_header
from p2ptrain.net.message import Message, PartsAllocator, Priority

log = get_logger(__name__)

Info = Mapping[str, int | float | str]


_UP = (MemberState.ALIVE, MemberState.SUSPECT)


def memory_id(name: str) -> str:
    """The id of the device of that name: stable over restarts, as a certificate's would be."""
    return hashlib.sha256(name.encode()).hexdigest()


class MemoryHousehold:
    """Several devices in one process. `async with`; the devices are its items by name."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        coordinator: str | None = None,
        infos: Mapping[str, Info] | None = None,
        link_speed: LinkSpeed | None = None,
    ) -> None:
        """Make one device a name.

        Args:
            names: unique names; all are alive from the start.
            coordinator: its name; without one, the first by name.
            infos: what each device says of itself, by name.
            link_speed: what `measure_link` answers; measured really without one.
        """
        self._infos = dict(infos or {})
        self._link_speed = link_speed
        self._states = dict.fromkeys(names, MemberState.ALIVE)
        self._term = 1
        self._coordinator = Coordinator(*_identity(coordinator or min(names)), term=self._term)
        self._meshes = {name: self._new_mesh(name) for name in names}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        for mesh in self._meshes.values():
            await mesh.close()

    def __getitem__(self, name: str) -> MemoryMesh:
        return self._meshes[name]

    @property
    def link_speed(self) -> LinkSpeed | None:
        """The given speed of every link, or None: measure."""
        return self._link_speed

    @property
    def coordinator(self) -> Coordinator:
        """Who coordinates now."""
        return self._coordinator

    @property
    def members(self) -> dict[str, Member]:
        """Every device that ever was here, by id."""
        return {memory_id(name): self._member(name) for name in self._states}

    def running(self, device_id: str) -> MemoryMesh | None:
        """The device, if it is up."""
        for mesh in self._meshes.values():
            if mesh.self_id == device_id and self._states[mesh.name] in _UP:
                return mesh
        return None

    async def kill(self, name: str) -> None:
        """The device dies at once: members see it dead, calls to it raise LinkClosed."""
        await self._remove(name, MemberState.DEAD, "killed")

    async def leave(self, name: str) -> None:
        """The device says good-bye."""
        await self._remove(name, MemberState.LEFT, "left")

    async def join(self, name: str) -> MemoryMesh:
        """A device comes, or comes back with the same id and nothing routed."""
        if self._states.get(name) is MemberState.ALIVE:
            raise InternalError(f"{name} is here already")
        self._states[name] = MemberState.ALIVE
        self._meshes[name] = self._new_mesh(name)
        self._tell(MemberChanged(self._member(name), "joined"))
        return self._meshes[name]

    def suspect(self, name: str) -> None:
        """The others suspect a device that lives and works on."""
        self._mark(name, MemberState.SUSPECT, "silent")

    def refute(self, name: str) -> None:
        """A suspected device was heard of again."""
        self._mark(name, MemberState.ALIVE, "refuted")

    def _mark(self, name: str, state: MemberState, reason: str) -> None:
        self._states[name] = state
        self._tell(MemberChanged(self._member(name), reason))

    def elect(self, name: str) -> None:
        """Make the device coordinator, in a new term."""
        self._term += 1
        self._coordinator = Coordinator(*_identity(name), term=self._term)
        self._tell(CoordinatorChanged(self._coordinator))

    def cut(self, one: MemoryMesh, other: MemoryMesh, why: str) -> None:
        """The link between two devices ends; a new one is there at once."""
        for mesh, peer in ((one, other), (other, one)):
            mesh.router.lost(peer.self_id, f"the link to {peer.name} ended: {why}")
            mesh.tell(LinkLost(peer.self_id, why))

    async def _remove(self, name: str, state: MemberState, reason: str) -> None:
        gone = self._meshes[name]
        self._states[name] = state
        await gone.close()
        for mesh in self._running():
            mesh.router.lost(gone.self_id, f"{name} is {state}")
        self._tell(MemberChanged(self._member(name), reason))
        survivors = [mesh.name for mesh in self._running()]
        if self._coordinator.name == name and survivors:
            self.elect(min(survivors))

    def _new_mesh(self, name: str) -> MemoryMesh:
        return MemoryMesh(self, name)

    def _member(self, name: str) -> Member:
        return Member(memory_id(name), name, self._states[name], self._infos.get(name, {}))

    def _running(self) -> list[MemoryMesh]:
        return [m for m in self._meshes.values() if self._states[m.name] in _UP]

    def _tell(self, event: MeshEvent) -> None:
        for mesh in self._running():
            mesh.tell(event)


class MemoryMesh:
    """One device of a `MemoryHousehold`; see `Mesh` for what each method promises."""

    def __init__(self, household: MemoryHousehold, name: str) -> None:
        self.router = Router(name, self.send)
        self._household = household
        self._name = name
        self._id = memory_id(name)
        self._callbacks: list[Callable[[MeshEvent], None]] = []
        self._order: defaultdict[tuple[str, Priority], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._statistics: dict[str, LinkStatistics] = {}
        probe.ProbeReceiver().install(self)

    @property
    def self_id(self) -> str:
        return self._id

    @property
    def name(self) -> str:
        return self._name

    @property
    def members(self) -> Mapping[str, Member]:
        return MappingProxyType(self._household.members)

    @property
    def coordinator(self) -> Coordinator | None:
        return self._household.coordinator

    def subscribe(self, callback: Callable[[MeshEvent], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    def route(self, kind: str, handler: Handler, parts: PartsAllocator | None = None) -> None:
        self.router.route(kind, handler, parts)

    def route_now(self, kind: str, take: Take, parts: PartsAllocator | None = None) -> None:
        self.router.route_now(kind, take, parts)

    def unroute(self, kind: str) -> None:
        self.router.unroute(kind)

    async def send(
        self, peer_id: str, message: Message, priority: Priority = Priority.CONTROL
    ) -> None:
        if peer_id == self._id:
            self._peer(peer_id)
            await self.router.deliver(self._id, message)
            return
        async with self._order[peer_id, priority]:
            # Let others run, as waiting for a socket would; handlers would starve without it.
            await asyncio.sleep(0)
            await self._carry(self._peer(peer_id), message)

    async def call(
        self,
        peer_id: str,
        message: Message,
        *,
        timeout_seconds: float,
        priority: Priority = Priority.CONTROL,
        reply_parts: PartsAllocator | None = None,
    ) -> Message:
        return await self.router.call(peer_id, message, timeout_seconds, priority, reply_parts)

    def link_statistics(self, peer_id: str) -> LinkStatistics | None:
        return self._statistics.get(peer_id)

    async def measure_link(self, peer_id: str, duration_seconds: float = 0.2) -> LinkSpeed:
        self._peer(peer_id)
        return self._household.link_speed or await probe.measure(self, peer_id, duration_seconds)

    def tell(self, event: MeshEvent) -> None:
        """Hand an event to the subscribers."""
        for callback in tuple(self._callbacks):
            callback(event)

    def count(self, peer_id: str, sent_bytes: int, received_bytes: int, parts_bytes: int) -> None:
        """Add to the counters of the link to `peer_id`."""
        old = self._statistics.get(peer_id, LinkStatistics(0, 0, 0))
        self._statistics[peer_id] = LinkStatistics(
            old.sent_bytes + sent_bytes,
            old.received_bytes + received_bytes,
            old.sent_parts_bytes + parts_bytes,
        )

    async def close(self) -> None:
        """Stop the handlers; calls of this device raise LinkClosed."""
        for member_id in self._household.members:
            self.router.lost(member_id, f"{self._name} stopped")
        await self.router.close()

    async def _carry(self, receiver: MemoryMesh, message: Message) -> None:
        sizes = [part.nbytes for part in message.parts]
        encoded = encode_header(message.kind, message.fields, sizes, message.part_kinds)
        try:
            arrived = receiver.take_in(self._id, encoded, message)
            await receiver.router.deliver(self._id, arrived)
        except ProtocolError as error:
            log.warning("link_closed", peer=receiver.name, why=str(error))
            self._household.cut(self, receiver, str(error))
            raise LinkClosed(f"the link to {receiver.name} ended: {error}") from error
        self.count(receiver.self_id, len(encoded) + message.parts_bytes, 0, message.parts_bytes)
        receiver.count(self._id, 0, len(encoded) + message.parts_bytes, 0)

    def take_in(self, peer_id: str, encoded: bytes, sent: Message) -> Message:
        """Decode a header and copy the parts into the buffers that its route opens for them.

        Returns:
            The message, without its parts where its kind is not routed.
        """
        header = decode_header(encoded)
        if not header.part_bytes:
            return Message(header.kind, header.fields)
        buffers = self.router.open_parts(peer_id, header.kind, header.fields, header.part_bytes)
        if buffers is None:
            return Message(header.kind, header.fields)
        if [buffer.nbytes for buffer in buffers] != list(header.part_bytes):
            raise ProtocolError(f"the parts of {header.kind!r} do not have the expected sizes")
        for buffer, part in zip(buffers, sent.parts, strict=True):
            buffer[:] = part
        return Message(header.kind, header.fields, tuple(buffers), header.part_kinds)

    def _peer(self, peer_id: str) -> MemoryMesh:
        if self._household.running(self._id) is not self:
            raise LinkClosed(f"{self._name} has stopped")
        peer = self._household.running(peer_id)
        if peer is None:
            raise LinkClosed(f"there is no link to the device {peer_id[:16]}")
        return peer


def _identity(name: str) -> tuple[str, str]:
    return memory_id(name), name
