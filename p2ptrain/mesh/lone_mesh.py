"""A household of one device: what `--local` trains on, without a network."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from p2ptrain.errors import LinkClosed
from p2ptrain.mesh.interface import (
    LinkSpeed,
    LinkStatistics,
    MemberState,
    MeshCoordinator,
    MeshEvent,
    MeshMember,
)
from p2ptrain.mesh.links.router import Router
from p2ptrain.net.message import Message, Priority


class LoneMesh:
    """A `Mesh` of this device alone, which coordinates itself; nothing ever changes."""

    def __init__(self, name: str) -> None:
        device_id = hashlib.sha256(name.encode()).hexdigest()
        self.router = Router(name, self.send)
        self.self_id, self.name = device_id, name
        self.members: Mapping[str, MeshMember] = {
            device_id: MeshMember(device_id, name, MemberState.ALIVE, {})
        }
        self.connected: frozenset[str] = frozenset()
        self.coordinator = MeshCoordinator(device_id, name, term=1)
        self.route = self.router.route
        self.route_now = self.router.route_now
        self.unroute = self.router.unroute
        self.call = self.router.call
        self.close = self.router.close

    def distrust(self, device_id: str, seconds: float) -> None:
        """No other device could coordinate."""

    def subscribe(self, callback: Callable[[MeshEvent], None]) -> Callable[[], None]:
        """Nothing happens that could be said."""
        return lambda: None

    async def send(
        self, peer_id: str, message: Message, priority: Priority = Priority.CONTROL
    ) -> None:
        """Deliver to this device. Raises LinkClosed for any other."""
        self._check_own(peer_id)
        await self.router.deliver(peer_id, message)

    def link_statistics(self, peer_id: str) -> LinkStatistics | None:
        """There are no links."""
        return None

    async def measure_link(self, peer_id: str, duration_seconds: float = 0.2) -> LinkSpeed:
        """Raises LinkClosed: there are no links."""
        raise LinkClosed(f"there is no link to the device {peer_id[:16]}")

    def _check_own(self, peer_id: str) -> None:
        if peer_id != self.self_id:
            raise LinkClosed(f"there is no link to the device {peer_id[:16]}")
