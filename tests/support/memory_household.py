"""A household in one process and one event loop, without sockets.

What leaves a device is encoded, decoded and copied into the receiver's buffers, so that what works
here has passed the same limits and the same allocators as on a network. Membership, election and
faults are decided from outside (`kill`, `freeze`, `partition`, `elect`, ...): a test says what
happens and when, and every device hears of it what it would hear on a network, in that order.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Self

from p2ptrain.errors import InternalError, LinkClosed, ProtocolError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import (
    CoordinatorChanged,
    LinkLost,
    LinkSpeed,
    LinkStatistics,
    LinkUp,
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
        self.link_speed = link_speed
        self._names = {memory_id(name): name for name in names}
        self._term = 1
        first = MeshCoordinator(*_identity(coordinator or min(names)), term=self._term)
        self._numbers = itertools.count(1)
        self._links: dict[frozenset[str], int] = {}  # ids of two devices -> their link's number
        self._unlinked: set[frozenset[str]] = set()  # ids of two devices that cannot reach another
        self._up: set[str] = set(self._names)  # ids of the processes that run
        self._meshes = {name: MemoryMesh(self, memory_id(name), name, first) for name in names}
        for mesh in self._meshes.values():
            mesh.seen = dict.fromkeys(self._names, MemberState.ALIVE)
        for one, other in itertools.combinations(self._names, 2):
            self._links[frozenset((one, other))] = next(self._numbers)

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
    def coordinator(self) -> MeshCoordinator:
        """Who was elected last, of those whom the devices that run follow."""
        followed = [m.coordinator for m in self._meshes.values() if m.coordinator is not None]
        return max(followed, key=lambda coordinator: coordinator.term)

    # -- what the devices ask ------------------------------------------------------------------

    def member(self, device_id: str, state: MemberState) -> MeshMember:
        """What others know of that device."""
        name = self._names[device_id]
        return MeshMember(device_id, name, state, self._infos.get(name, {}))

    def running(self, device_id: str) -> MemoryMesh | None:
        """The device, if its process runs."""
        return self._meshes[self._names[device_id]] if device_id in self._up else None

    def link(self, one: MemoryMesh, other: MemoryMesh) -> int | None:
        """A number that no other link has, or None: there is none between them now."""
        return self._links.get(frozenset((one.self_id, other.self_id)))

    def peers(self, mesh: MemoryMesh) -> frozenset[str]:
        """Ids of those to whom `mesh` has a link."""
        if self.running(mesh.self_id) is not mesh:
            return frozenset()
        pairs = [pair for pair in self._links if mesh.self_id in pair]
        return frozenset().union(*pairs) - {mesh.self_id}

    def describe(self, mesh: MemoryMesh, info: Info) -> None:
        """The others hear what it says of itself."""
        self._infos[mesh.name] = info
        for other in self._others(mesh):
            state = other.seen[mesh.self_id]
            described = state is MemberState.ALIVE
            member = self.member(mesh.self_id, state)
            other.tell(MemberChanged(member, "it says so itself", described=described))

    def distrust(self, mesh: MemoryMesh, device_id: str) -> None:
        """The others elect another one, if that device coordinates as `mesh` sees it."""
        office = mesh.coordinator
        if office is not None and office.id == device_id and self.running(mesh.self_id) is mesh:
            self._term += 1
            others = [m for m in self._running() if m.self_id != device_id]
            near = [m for m in others if m is mesh or self._is_near(m, mesh)]
            new = MeshCoordinator(*_identity(min(m.name for m in near)), term=self._term)
            for one in near:
                one.follow(new)

    # -- devices come and go ---------------------------------------------------------------------

    async def kill(self, name: str) -> None:
        """The device dies at once: its links end, and it is seen dead for certain."""
        await self._remove(name, MemberState.DEAD, "killed")

    async def leave(self, name: str) -> None:
        """The device says good-bye."""
        await self._remove(name, MemberState.LEFT, "left")

    async def join(self, name: str) -> MemoryMesh:
        """A device comes, or comes back with the same id and nothing routed."""
        device = memory_id(name)
        if device in self._up:
            raise InternalError(f"{name} is here already")
        self._names[device] = name
        self._up.add(device)
        mesh = MemoryMesh(self, device, name, self.coordinator)
        self._meshes[name] = mesh
        for peer in self._others(mesh):
            mesh.seen |= peer.seen
            self._join(mesh, peer)
        for seer in self._running():
            seer.see(device, MemberState.ALIVE, "joined", certain=False)
        return mesh

    async def restart(self, name: str) -> MemoryMesh:
        """The device's process ends, and a new one comes at once with nothing routed."""
        await self.kill(name)
        return await self.join(name)

    def suspect(self, name: str) -> None:
        """The others suspect a device that lives and works on."""
        self._mark(name, MemberState.SUSPECT, "silent", self._running())

    def refute(self, name: str) -> None:
        """A suspected device was heard of again."""
        self._mark(name, MemberState.ALIVE, "refuted", self._running())

    def elect(self, name: str) -> None:
        """Make the device coordinator, in a new term, of all that it can reach."""
        self._term += 1
        office = MeshCoordinator(*_identity(name), term=self._term)
        for mesh in self._running():
            if mesh.name == name or self._is_near(mesh, self._meshes[name]):
                mesh.follow(office)

    # -- links -----------------------------------------------------------------------------------

    def cut(self, one: MemoryMesh, other: MemoryMesh, why: str) -> None:
        """The link between two devices ends; a new one is there at once."""
        self._part(one, other, why)
        self._join(one, other)

    def cut_link(self, one: str, other: str, why: str = "unplugged") -> None:
        """The link between two devices ends, and there is none until `heal_link`.

        Nobody is declared dead: the others hear both.
        """
        self._unlinked.add(frozenset((memory_id(one), memory_id(other))))
        self._part(self[one], self[other], why)

    def heal_link(self, one: str, other: str) -> None:
        """Two devices can reach each other again."""
        self._unlinked.discard(frozenset((memory_id(one), memory_id(other))))
        self._join(self[one], self[other])

    def partition(self, *groups: Iterable[str]) -> None:
        """Split the network: each group sees the others silent, then dead, and elects its own.

        Args:
            groups: names; who stands in none is in one further group.
        """
        sides = [{memory_id(name) for name in group} for group in groups]
        sides.append(set(self._names).difference(*sides))
        for one, other in itertools.combinations(sides, 2):
            for pair in itertools.product(sorted(one), sorted(other)):
                self._unlinked.add(frozenset(pair))
                self._part_ids(pair, "the network is split")
        for side in sides:
            for mesh in [mesh for mesh in self._running() if mesh.self_id in side]:
                for device in sorted(set(mesh.seen) - side):
                    if mesh.seen[device] in _UP:
                        mesh.see(device, MemberState.DEAD, "silent", certain=False)
            self._replace_coordinator(side)

    def heal(self) -> None:
        """Every device reaches every other again; all follow the coordinator elected last."""
        self._unlinked.clear()
        for one, other in itertools.combinations(self._running(), 2):
            self._join(one, other)
        self._meet(self._running())

    def hear(self) -> None:
        """All hear through others that all are alive, before they have links: gossip is quicker."""
        self._meet(self._running())

    # -- frozen devices --------------------------------------------------------------------------

    def freeze(self, name: str) -> None:
        """The device stands still: what is sent to it waits, what it sends waits, no link ends."""
        self[name].freeze()

    def declare_dead(self, name: str) -> None:
        """The others see a silent device dead, end their links to it and elect another one."""
        silent = self[name]
        others = self._others(silent)
        self._mark(name, MemberState.DEAD, "silent", others)
        for mesh in others:
            self._unlinked.add(frozenset((mesh.self_id, silent.self_id)))
            self._part(mesh, silent, f"{name} was declared dead")
        self._replace_coordinator({mesh.self_id for mesh in others})

    async def thaw(self, name: str, *, informed: bool = True) -> None:
        """The device goes on, first with what had reached it, then over new links.

        Args:
            name: the device.
            informed: whether it hears at once who coordinates now; else by `tell_coordinator`, so
                that it acts as the coordinator it was.
        """
        mesh = self[name]
        await mesh.thaw()
        self._unlinked = {pair for pair in self._unlinked if mesh.self_id not in pair}
        others = self._others(mesh)
        for other in others:
            self._join(other, mesh)
        self._meet([*others, mesh], follow=False)
        if informed:
            self.tell_coordinator(name)

    def tell_coordinator(self, name: str) -> None:
        """The device hears who coordinates, if it follows another one."""
        if self[name].coordinator != self.coordinator:
            self[name].follow(self.coordinator)

    # -- how ---------------------------------------------------------------------------------------

    async def _remove(self, name: str, state: MemberState, reason: str) -> None:
        gone = self._meshes[name]
        near = [mesh for mesh in self._others(gone) if self._is_near(mesh, gone)]
        self._up.discard(gone.self_id)
        await gone.close()
        for mesh in self._running():
            self._part(mesh, gone, f"{name} is {state}")
        self._mark(name, state, reason, near, certain=True)
        self._replace_coordinator(self._up)

    def _mark(
        self,
        name: str,
        state: MemberState,
        reason: str,
        seers: Sequence[MemoryMesh],
        *,
        certain: bool = False,
    ) -> None:
        for mesh in seers:
            mesh.see(memory_id(name), state, reason, certain=certain)

    def _replace_coordinator(self, side: Iterable[str]) -> None:
        """Where the devices of `side` have lost their coordinator, the first by name follows."""
        group = [mesh for mesh in self._running() if mesh.self_id in set(side)]
        here = {mesh.self_id for mesh in group}
        office = {mesh.coordinator.id for mesh in group if mesh.coordinator is not None}
        if group and not office <= here:
            self.elect(min(mesh.name for mesh in group))

    def _meet(self, meshes: Sequence[MemoryMesh], *, follow: bool = True) -> None:
        """These devices hear each other, perhaps again."""
        newest = self.coordinator
        for mesh in meshes:
            for other in meshes:
                if mesh.seen[other.self_id] is not MemberState.ALIVE:
                    mesh.see(other.self_id, MemberState.ALIVE, "heard of again", certain=False)
            if follow and mesh.coordinator != newest:
                mesh.follow(newest)

    def _part(self, one: MemoryMesh, other: MemoryMesh, why: str) -> None:
        if self._links.pop(frozenset((one.self_id, other.self_id)), None) is None:
            return
        for mesh, peer in ((one, other), (other, one)):
            mesh.stir()
            if mesh.self_id in self._up:
                mesh.router.lost(peer.self_id, f"the link to {peer.name} ended: {why}")
                mesh.tell(LinkLost(peer.self_id, why))

    def _part_ids(self, pair: Sequence[str], why: str) -> None:
        one, other = (self._meshes[self._names[device]] for device in pair)
        self._part(one, other, why)

    def _join(self, one: MemoryMesh, other: MemoryMesh) -> None:
        pair = frozenset((one.self_id, other.self_id))
        if pair in self._links or pair in self._unlinked or not pair <= self._up:
            return
        self._links[pair] = next(self._numbers)
        one.tell(LinkUp(other.self_id))
        other.tell(LinkUp(one.self_id))

    def _is_near(self, one: MemoryMesh, other: MemoryMesh) -> bool:
        """Whether news travels between the two: over a link or through a third device."""
        mine = self.peers(one)
        return other.self_id in mine or bool(mine & self.peers(other))

    def _others(self, mesh: MemoryMesh) -> list[MemoryMesh]:
        return [other for other in self._running() if other is not mesh]

    def _running(self) -> list[MemoryMesh]:
        return [mesh for mesh in self._meshes.values() if mesh.self_id in self._up]


def _identity(name: str) -> tuple[str, str]:
    return memory_id(name), name


class MemoryMesh:
    """One device of a `MemoryHousehold`; see `Mesh` for what each method promises.

    Attributes:
        seen: the state of every device that ever was here, by id, as this one sees it.
    """

    def __init__(
        self, around: MemoryHousehold, self_id: str, name: str, coordinator: MeshCoordinator
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
