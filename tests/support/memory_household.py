"""A household in one process and one event loop, without sockets.

What leaves a device is encoded, decoded and copied into the receiver's buffers, so that what works
here has passed the same limits and the same allocators as on a network. Membership, election and
faults are decided from outside (`kill`, `freeze`, `partition`, `elect`, ...): a test says what
happens and when, and every device hears of it what it would hear on a network, in that order.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from p2ptrain.errors import InternalError
from p2ptrain.mesh.interface import (
    LinkLost,
    LinkSpeed,
    LinkUp,
    MemberChanged,
    MemberState,
    MeshCoordinator,
    MeshMember,
)
from tests.support.memory_mesh import MemoryMesh

__all__ = ["MemoryHousehold", "MemoryMesh", "memory_id"]

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

    # -- what the devices ask (`memory_mesh.Surroundings`) ---------------------------------------

    @property
    def link_speed(self) -> LinkSpeed | None:
        """The given speed of every link, or None: measure."""
        return self._link_speed

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
