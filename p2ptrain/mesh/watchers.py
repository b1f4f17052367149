"""Those who watch a mesh: subscribers get every event, people those that changed something."""

from __future__ import annotations

from collections.abc import Callable

from p2ptrain.mesh.interface import (
    Coordinator,
    CoordinatorChanged,
    Member,
    MemberChanged,
    MemberState,
    MeshEvent,
)
from p2ptrain.observe.events import CoordinatorEvent, Event, MemberEvent


class Watchers:
    """Hands mesh events on."""

    def __init__(self, self_id: str, emit: Callable[[Event], None]) -> None:
        """`emit` takes events for people; none about this device itself."""
        self._self_id = self_id
        self._emit = emit
        self._callbacks: list[Callable[[MeshEvent], None]] = []
        self._shown: dict[str, tuple[str, MemberState]] = {}

    def subscribe(self, callback: Callable[[MeshEvent], None]) -> Callable[[], None]:
        """See `Mesh.subscribe`."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    def tell(self, event: MeshEvent) -> None:
        """Hand one event to all."""
        match event:
            case MemberChanged(member) if member.id != self._self_id:
                self._show(member)
            case CoordinatorChanged(Coordinator(name=name, term=term)):
                self._emit(CoordinatorEvent(name, term))
        for callback in tuple(self._callbacks):
            callback(event)

    def _show(self, member: Member) -> None:
        shown = (member.name, member.state)
        if self._shown.get(member.id) != shown:
            self._shown[member.id] = shown
            self._emit(MemberEvent(member.name, member.state.value))
