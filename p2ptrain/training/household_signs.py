"""What the mesh says of the household, told to the rules of a job: who is there, who is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2ptrain.errors import PeerError
from p2ptrain.mesh.interface import (
    Coordinator,
    CoordinatorChanged,
    LinkLost,
    MemberChanged,
    MemberState,
    Mesh,
    MeshEvent,
)
from p2ptrain.net.message import Message
from p2ptrain.training.protocol import MEASURE_LINKS
from p2ptrain.training.recovery import holder_events as rules

PROBE_SECONDS = 0.2
PROBE_TIMEOUT_SECONDS = 2.0


class HouseholdSigns:
    """See the module. `watch` from the start of a job to its end.

    Args:
        alone: the job wants no other device.
        tell: hears each sign.
    """

    def __init__(self, mesh: Mesh, alone: bool, tell: Callable[[rules.HolderEvent], None]) -> None:
        self._mesh = mesh
        self._alone = alone
        self._tell = tell

    def watch(self) -> Callable[[], None]:
        """Tell what is so now, and what changes, until the returned function is called."""
        unsubscribe = self._mesh.subscribe(self._on_mesh_event)
        for member in self._mesh.members.values():
            if member.state is MemberState.ALIVE:
                self._on_member(member.id, member.state)
        self._on_coordinator(self._mesh.coordinator)
        return unsubscribe

    def _on_mesh_event(self, event: MeshEvent) -> None:
        match event:
            case MemberChanged(member):
                self._on_member(member.id, member.state)
            case CoordinatorChanged(coordinator):
                self._on_coordinator(coordinator)
            case LinkLost(peer):
                self._tell(rules.LinkTrouble(self._mesh.self_id, peer))

    def _on_member(self, device: str, state: MemberState) -> None:
        if self._alone and device != self._mesh.self_id:
            return
        match state:
            case MemberState.ALIVE:
                self._tell(rules.Appeared(device))
            case MemberState.DEAD | MemberState.LEFT:
                self._tell(rules.Died(device, certain=True))
            case MemberState.SUSPECT:
                pass  # it may refute

    def _on_coordinator(self, coordinator: Coordinator | None) -> None:
        known = (None, 0) if coordinator is None else (coordinator.id, coordinator.term)
        self._tell(rules.Coordinates(*known))

    async def look_for_link(self, one: str, other: str, wanted: Callable[[], bool]) -> None:
        """Tell once the link between two devices is back; the mesh dials again by itself.

        Args:
            wanted: whether anybody still waits for it.
        """
        while wanted():
            if await self._is_linked(one, other):
                self._tell(rules.LinkBack(one, other))
                return
            await asyncio.sleep(PROBE_SECONDS)

    async def _is_linked(self, one: str, other: str) -> bool:
        asked, peers = (other, []) if one == self._mesh.self_id else (one, [other])
        message = Message(MEASURE_LINKS, {"peers": peers})
        try:
            reply = await self._mesh.call(asked, message, timeout_seconds=PROBE_TIMEOUT_SECONDS)
        except (PeerError, TimeoutError):
            return False
        return not peers or bool(reply.fields.get("speeds"))
