"""Subscribers of a mesh: events for programs, changes for the user, each warning once.

A warning that repeats would hide the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from p2ptrain import events
from p2ptrain.events import Event
from p2ptrain.manners.condition import DeviceCondition, Work
from p2ptrain.mesh.interface import (
    CoordinatorChanged,
    MemberChanged,
    MemberState,
    MeshCoordinator,
    MeshEvent,
    MeshMember,
)


class EventSubscribers:
    """Hands mesh events on."""

    def __init__(self, self_id: str, emit: Callable[[Event], None]) -> None:
        """`emit` takes events for the user; none about this device itself."""
        self._self_id = self_id
        self._emit = emit
        self._callbacks: list[Callable[[MeshEvent], None]] = []
        self._shown: dict[str, tuple[str, MemberState]] = {}
        self._conditions: dict[str, tuple[Work, str]] = {}

    def subscribe(self, callback: Callable[[MeshEvent], None]) -> Callable[[], None]:
        """See `Mesh.subscribe`."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    def notify(self, event: MeshEvent) -> None:
        """Hand one event to all."""
        match event:
            case MemberChanged(member) if member.id != self._self_id:
                self._show(member)
            case CoordinatorChanged(MeshCoordinator(name=name, term=term)):
                self._emit(events.Coordinator(name, term))
        for callback in tuple(self._callbacks):
            callback(event)

    def _show(self, member: MeshMember) -> None:
        shown = (member.name, member.state)
        if self._shown.get(member.id) != shown:
            self._shown[member.id] = shown
            self._emit(events.Member(member.name, member.state.value))
        if member.state is MemberState.ALIVE:
            self._show_condition(member)

    def _show_condition(self, member: MeshMember) -> None:
        now = DeviceCondition.of_info(member.info)
        work, sentence = self._conditions.get(member.id, (Work.FULL, ""))
        if (now.work, now.sentence) != (work, sentence):
            self._conditions[member.id] = now.work, now.sentence
            self._emit(events.Condition(member.name, now.work.value, now.sentence))


REMEMBERED_LIMIT = 256
"""Any device on the network can make up addresses, and with them new texts."""


class WarnOnce:
    """Warns of each text once; of more than REMEMBERED_LIMIT the oldest are forgotten.

    Attributes:
        emit: takes events for the user, never blocks.
    """

    def __init__(self, emit: Callable[[Event], None], name_of: Callable[[str], str]) -> None:
        """`name_of` gives a device's name by its id."""
        self.emit = emit
        self._name_of = name_of
        self._given: OrderedDict[str, None] = OrderedDict()

    def warn(self, text: str) -> None:
        """Show the user a warning, once."""
        if text in self._given:
            return
        self._given[text] = None
        if len(self._given) > REMEMBERED_LIMIT:
            self._given.popitem(last=False)
        self.emit(events.Warning(text))

    def mismatch(self, peer_id: str, why: str) -> None:
        """A trusted device speaks another protocol version."""
        self.warn(f"{self._name_of(peer_id)} is not connected: {why}")

    def distrusted(self, peer_id: str) -> None:
        """A device that this one was connected to has removed it."""
        self.warn(
            f"{self._name_of(peer_id)} does not accept this device any more. To come back, run "
            "`p2ptrain invite` there and start this one with that --code"
        )
