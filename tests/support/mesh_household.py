"""Helpers: several `NetworkMesh` in one process, over real TLS on loopback, found by a fake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from p2ptrain.events import Event
from p2ptrain.mesh.config import MeshConfig
from p2ptrain.mesh.discovery.addresses import DiscoveredDevice
from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.network_mesh import NetworkMesh

CODE = "12345678"
Kind = TypeVar("Kind", bound=Event)


class FakeNetwork:
    """A network on which every announcement is heard by all, at once."""

    def __init__(self) -> None:
        self._heard: dict[FakeDiscovery, DiscoveredDevice] = {}

    def join(self, who: FakeDiscovery, candidate: DiscoveredDevice) -> None:
        """Tell all of the newcomer, and the newcomer of all."""
        for other, known in self._heard.items():
            other.on_found(candidate)
            who.on_found(known)
        self._heard[who] = candidate

    def part(self, who: FakeDiscovery) -> None:
        """It is heard no more."""
        self._heard.pop(who, None)


class FakeDiscovery:
    """See `p2ptrain.mesh.discovery.mdns.Discovery`."""

    def __init__(self, network: FakeNetwork) -> None:
        self._network = network
        self.on_found: Callable[[DiscoveredDevice], None] = lambda _candidate: None

    async def start(
        self, device_id: str, port: int, on_found: Callable[[DiscoveredDevice], None]
    ) -> None:
        """Announce this device at loopback."""
        self.on_found = on_found
        self._network.join(self, DiscoveredDevice(device_id, (("127.0.0.1", port),), 1))

    async def close(self) -> None:
        """Withdraw."""
        self._network.part(self)


class Pulse:
    """Wakes all who wait for something to change anywhere in the household."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def beat(self) -> None:
        """Something changed."""
        self._event.set()
        self._event = asyncio.Event()

    async def next(self) -> None:
        """Wait for the next change."""
        await self._event.wait()


@dataclass
class Device:
    """One running device and what it has shown to people."""

    mesh: NetworkMesh
    events: list[Event]
    pulse: Pulse

    def shown(self, kind: type[Kind]) -> list[Kind]:
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
                await self.pulse.next()


class Household:
    """Starts devices; each has a folder of its own under `root`."""

    def __init__(self, root: Path, stack: AsyncExitStack) -> None:
        self.network = FakeNetwork()
        self.pulse = Pulse()
        self._root = root
        self._stack = stack

    def config(self, folder: str, /, **changes: Any) -> MeshConfig:
        """The device's configuration: any port, loopback only."""
        config = MeshConfig(
            self._root / folder, folder, code=CODE, interfaces=("127.0.0.1",), port=0
        )
        return replace(config, **changes)

    async def start(self, folder: str, /, **changes: Any) -> Device:
        """Start the device; it leaves when the household ends."""
        return await self._stack.enter_async_context(self.running(folder, **changes))

    @asynccontextmanager
    async def running(self, folder: str, /, **changes: Any) -> AsyncIterator[Device]:
        """Start the device and let it leave at the end."""
        events: list[Event] = []

        def emit(event: Event) -> None:
            events.append(event)
            self.pulse.beat()

        mesh = NetworkMesh(self.config(folder, **changes), emit, FakeDiscovery(self.network))
        mesh.subscribe(lambda _event: self.pulse.beat())
        device = Device(mesh, events, self.pulse)
        async with mesh:
            yield device


@asynccontextmanager
async def household(root: Path) -> AsyncIterator[Household]:
    """A household whose devices all leave at the end."""
    async with AsyncExitStack() as stack:
        yield Household(root, stack)
