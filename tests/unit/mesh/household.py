"""Helpers: several `NetworkMesh` in one process, over real TLS on loopback, found by a fake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from p2ptrain.mesh.config import MeshConfig
from p2ptrain.mesh.discovered import Candidate
from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.mesh import NetworkMesh
from p2ptrain.observe.events import Event

CODE = "12345678"
Kind = TypeVar("Kind", bound=Event)


class FakeNetwork:
    """A network on which every announcement is heard by all, at once."""

    def __init__(self) -> None:
        self._heard: dict[FakeDiscovery, Candidate] = {}

    def discovery(self, device_id: str) -> FakeDiscovery:
        """One device's access to it."""
        return FakeDiscovery(self, device_id)

    def join(self, who: FakeDiscovery, candidate: Candidate) -> None:
        """Tell all of the newcomer, and the newcomer of all."""
        for other, known in self._heard.items():
            other.on_found(candidate)
            who.on_found(known)
        self._heard[who] = candidate

    def part(self, who: FakeDiscovery) -> None:
        """It is heard no more."""
        self._heard.pop(who, None)


class FakeDiscovery:
    """See `p2ptrain.mesh.discovery.Discovery`."""

    def __init__(self, network: FakeNetwork, device_id: str) -> None:
        self._network = network
        self._id = device_id
        self.on_found: Callable[[Candidate], None] = lambda _candidate: None

    async def start(self, port: int, on_found: Callable[[Candidate], None]) -> None:
        """Announce this device at loopback."""
        self.on_found = on_found
        self._network.join(self, Candidate(self._id, (("127.0.0.1", port),), 1))

    async def close(self) -> None:
        """Withdraw."""
        self._network.part(self)


@dataclass
class Device:
    """One running device and what it has told people."""

    mesh: NetworkMesh
    events: list[Event]
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def told(self, kind: type[Kind]) -> list[Kind]:
        """The events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def alive(self) -> set[str]:
        """Names of the members alive, as this device sees them."""
        states = self.mesh.members.values()
        return {m.name for m in states if m.state is MemberState.ALIVE}

    async def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Wait until an event has made `condition` true."""
        async with asyncio.timeout(seconds):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class Household:
    """Starts devices; each has a folder of its own under `root`."""

    def __init__(self, root: Path, stack: AsyncExitStack) -> None:
        self.network = FakeNetwork()
        self._root = root
        self._stack = stack

    def config(self, name: str, **changes: Any) -> MeshConfig:
        """The device's configuration: any port, loopback only."""
        config = MeshConfig(
            self._root / name, name, code=CODE, interfaces=("127.0.0.1",), port=None
        )
        return replace(config, **changes)

    async def start(self, name: str, **changes: Any) -> Device:
        """Start the device; it leaves when the household ends."""
        return await self._stack.enter_async_context(self.running(name, **changes))

    @asynccontextmanager
    async def running(self, name: str, **changes: Any) -> AsyncIterator[Device]:
        """Start the device and let it leave at the end."""
        events: list[Event] = []
        changed = asyncio.Event()

        def emit(event: Event) -> None:
            events.append(event)
            changed.set()

        mesh = NetworkMesh(self.config(name, **changes), emit, _Later(self.network))
        mesh.subscribe(lambda _event: changed.set())
        device = Device(mesh, events, changed)
        async with mesh:
            yield device


class _Later:
    """A discovery that asks the mesh for its id when it starts."""

    def __init__(self, network: FakeNetwork) -> None:
        self._network = network
        self._inner: FakeDiscovery | None = None
        self.device_id = ""

    async def start(self, port: int, on_found: Callable[[Candidate], None]) -> None:
        """Announce; the bound method belongs to the mesh that starts us."""
        mesh: NetworkMesh = on_found.__self__  # type: ignore[attr-defined]
        self._inner = self._network.discovery(mesh.self_id)
        await self._inner.start(port, on_found)

    async def close(self) -> None:
        """Withdraw."""
        if self._inner is not None:
            await self._inner.close()


@asynccontextmanager
async def household(root: Path) -> AsyncIterator[Household]:
    """A household whose devices all leave at the end."""
    async with AsyncExitStack() as stack:
        yield Household(root, stack)
