"""One device of a household in one process; see memory.py."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from p2ptrain.errors import InternalError, LinkClosed, ProtocolError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import (
    CoordinatorChanged,
    LinkSpeed,
    LinkStatistics,
    MemberChanged,
    MemberState,
    MeshCoordinator,
    MeshEvent,
    MeshMember,
)
from p2ptrain.mesh.links import link_probe
from p2ptrain.mesh.links.router import Router
from p2ptrain.net.frame import decode_header, encode_header
from p2ptrain.net.message import Message, Priority

log = get_logger(__name__)

ARRIVALS_LIMIT = 64
"""Messages that wait before a frozen device, as in its sockets; a further sender has to wait."""
HELD_EVENTS_LIMIT = 1024
"""Events that a frozen device hears of when it thaws; no test tells it so many."""


class Surroundings(Protocol):
    """What a device needs of its household."""

    @property
    def link_speed(self) -> LinkSpeed | None:
        """The given speed of every link, or None: measure."""

    def member(self, device_id: str, state: MemberState) -> MeshMember:
        """What others know of that device."""

    def running(self, device_id: str) -> MemoryMesh | None:
        """The device, if its process runs."""

    def link(self, one: MemoryMesh, other: MemoryMesh) -> int | None:
        """A number that no other link has, or None: there is none between them now."""

    def peers(self, mesh: MemoryMesh) -> frozenset[str]:
        """Ids of those to whom `mesh` has a link."""

    def describe(self, mesh: MemoryMesh, info: Mapping[str, int | float | str]) -> None:
        """It says something else of itself."""

    def distrust(self, mesh: MemoryMesh, device_id: str) -> None:
        """That device is not to coordinate, as `mesh` sees it."""

    def cut(self, one: MemoryMesh, other: MemoryMesh, why: str) -> None:
        """The link breaks; a new one is there at once."""


class MemoryMesh:
    """One device of a `MemoryHousehold`; see `Mesh` for what each method promises.

    Attributes:
        seen: the state of every device that ever was here, by id, as this one sees it.
    """

    def __init__(
        self, around: Surroundings, self_id: str, name: str, coordinator: MeshCoordinator
    ) -> None:
        self.router = Router(name, self.send)
        self.route, self.route_now = self.router.route, self.router.route_now
        self.unroute, self.call = self.router.unroute, self.router.call
        self.seen: dict[str, MemberState] = {}
        self._around = around
        self._name = name
        self._id = self_id
        self._coordinator = coordinator
        self._callbacks: list[Callable[[MeshEvent], None]] = []
        self._order: defaultdict[tuple[str, Priority], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._statistics: dict[str, LinkStatistics] = {}
        self._thawed = asyncio.Event()
        self._thawed.set()
        self.moved = asyncio.Event()  # something changed for those who wait before a frozen device
        self.arrivals: deque[tuple[MemoryMesh, int, bytes, Message]] = deque()
        self._held: list[MeshEvent] = []
        link_probe.ProbeReceiver().install(self)

    @property
    def self_id(self) -> str:
        return self._id

    @property
    def name(self) -> str:
        return self._name

    @property
    def members(self) -> Mapping[str, MeshMember]:
        return MappingProxyType({i: self._around.member(i, s) for i, s in self.seen.items()})

    @property
    def connected(self) -> frozenset[str]:
        return self._around.peers(self)

    @property
    def coordinator(self) -> MeshCoordinator | None:
        return self._coordinator

    def distrust(self, device_id: str, seconds: float) -> None:
        if device_id != self._id:
            self._around.distrust(self, device_id)

    def describe(self, info: Mapping[str, int | float | str]) -> None:
        """As a member does whose battery is nearly empty."""
        self._around.describe(self, info)

    def subscribe(self, callback: Callable[[MeshEvent], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    async def send(
        self, peer_id: str, message: Message, priority: Priority = Priority.CONTROL
    ) -> None:
        await self._thawed.wait()
        if peer_id == self._id:
            self._check_runs()
            await self.router.deliver(self._id, message)
            return
        async with self._order[peer_id, priority]:
            # Let others run, as waiting for a socket would; handlers would starve without it.
            await asyncio.sleep(0)
            await self._carry(peer_id, message)

    def link_statistics(self, peer_id: str) -> LinkStatistics | None:
        return self._statistics.get(peer_id)

    async def measure_link(self, peer_id: str, duration_seconds: float = 0.2) -> LinkSpeed:
        self._peer(peer_id)
        return self._around.link_speed or await link_probe.measure_link(
            self, peer_id, duration_seconds
        )

    async def close(self) -> None:
        """Stop the handlers; calls of this device raise LinkClosed."""
        self.arrivals.clear()
        self._thawed.set()
        self.stir()
        for member_id in self.seen:
            self.router.lost(member_id, f"{self._name} stopped")
        await self.router.close()

    # -- what the household tells ----------------------------------------------------------------

    def tell(self, event: MeshEvent) -> None:
        """Hand an event to the subscribers; a frozen device hears of it when it thaws."""
        if not self._thawed.is_set():
            if len(self._held) == HELD_EVENTS_LIMIT:
                raise InternalError(f"{self._name} was told too much while it was frozen")
            self._held.append(event)
            return
        for callback in tuple(self._callbacks):
            callback(event)

    def see(self, device_id: str, state: MemberState, reason: str, *, certain: bool) -> None:
        """From now on the device is in that state for this one."""
        self.seen[device_id] = state
        self.tell(MemberChanged(self._around.member(device_id, state), reason, certain))

    def follow(self, coordinator: MeshCoordinator) -> None:
        """From now on this device follows `coordinator`."""
        self._coordinator = coordinator
        self.tell(CoordinatorChanged(coordinator))

    def count(self, peer_id: str, sent_bytes: int, received_bytes: int, parts_bytes: int) -> None:
        """Add to the counters of the link to `peer_id`."""
        old = self._statistics.get(peer_id, LinkStatistics(0, 0, 0))
        self._statistics[peer_id] = LinkStatistics(
            old.sent_bytes + sent_bytes,
            old.received_bytes + received_bytes,
            old.sent_parts_bytes + parts_bytes,
        )

    # -- frozen ----------------------------------------------------------------------------------

    @property
    def is_frozen(self) -> bool:
        """Whether it neither hears nor says anything."""
        return not self._thawed.is_set()

    def freeze(self) -> None:
        """Nothing is handled and nothing leaves until `thaw`."""
        self._thawed.clear()

    async def thaw(self) -> None:
        """First what waits in the sockets of links that still are is read, then all goes on."""
        while self.arrivals:
            sender, link, encoded, message = self.arrivals.popleft()
            self.stir()
            if self._around.link(sender, self) == link:
                await self.take(sender, encoded, message)
        self._thawed.set()
        held, self._held = self._held, []
        for event in held:
            self.tell(event)

    def stir(self) -> None:
        """Those who wait to send to this device shall look again."""
        self.moved.set()
        self.moved = asyncio.Event()

    # -- messages --------------------------------------------------------------------------------

    async def _carry(self, peer_id: str, message: Message) -> None:
        sizes = [part.nbytes for part in message.parts]
        encoded = encode_header(message.kind, message.fields, sizes, message.part_kinds)
        while True:
            receiver, link = self._peer(peer_id)
            if not receiver.is_frozen:
                await receiver.take(self, encoded, message)
            elif len(receiver.arrivals) < ARRIVALS_LIMIT:
                receiver.arrivals.append((self, link, encoded, message))
            else:
                await receiver.moved.wait()
                continue
            self.count(peer_id, len(encoded) + message.parts_bytes, 0, message.parts_bytes)
            if message.on_sent is not None:
                message.on_sent()
            return

    async def take(self, sender: MemoryMesh, encoded: bytes, message: Message) -> None:
        """A message of another device arrives here."""
        try:
            arrived = self._decoded(sender.self_id, encoded, message)
            await self.router.deliver(sender.self_id, arrived)
        except ProtocolError as error:
            log.warning("link_closed", peer=self._name, why=str(error))
            self._around.cut(sender, self, str(error))
            raise LinkClosed(f"the link to {self._name} ended: {error}") from error
        self.count(sender.self_id, 0, len(encoded) + message.parts_bytes, 0)

    def _decoded(self, peer_id: str, encoded: bytes, sent: Message) -> Message:
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

    def _check_runs(self) -> None:
        if self._around.running(self._id) is not self:
            raise LinkClosed(f"{self._name} has stopped")

    def _peer(self, peer_id: str) -> tuple[MemoryMesh, int]:
        """The device, and the number of the link to it.

        Raises:
            LinkClosed: one of the two has stopped, or nothing joins them now.
        """
        self._check_runs()
        peer = self._around.running(peer_id)
        link = self._around.link(self, peer) if peer is not None else None
        if peer is None or link is None:
            raise LinkClosed(f"there is no link to the device {peer_id[:16]}")
        return peer, link
