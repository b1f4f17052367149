"""Keeps this device's name unique: gives way to whoever had it first (names.py has the rule)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from p2ptrain.errors import UserError
from p2ptrain.mesh.connections import Connections
from p2ptrain.mesh.device_file import DeviceFile
from p2ptrain.mesh.names import free_name, must_rename
from p2ptrain.mesh.roster import Roster
from p2ptrain.mesh.trust_store import TrustStore
from p2ptrain.observe.events import Event, Renamed


@dataclass(frozen=True, slots=True)
class NameHooks:
    """What people are told.

    Attributes:
        emit: takes events for people.
        warn: tells people something, once however often it happens.
    """

    emit: Callable[[Event], None]
    warn: Callable[[str], None]


class NameKeeper:
    """Watches the names of all others. Names that cannot be written count until the end."""

    def __init__(
        self,
        file: DeviceFile,
        trust: TrustStore,
        connections: Connections,
        roster: Roster,
        hooks: NameHooks,
    ) -> None:
        self._file = file
        self._trust = trust
        self._connections = connections
        self._roster = roster
        self._hooks = hooks

    def heard(self, peer_id: str, self_id: str, name: str) -> None:
        """The device calls itself `name`: remember that, and give way if need be."""
        self._keep(lambda: self._trust.rename(peer_id, name))
        link = self._connections.link(peer_id)
        if link is None or link.theirs is None or link.said is None:
            return
        theirs = replace(link.theirs, name=name)
        own = replace(link.said, name=self._file.name)
        if must_rename(own, self_id, theirs, peer_id):
            self._rename(free_name(self._file.asked_name, self._taken(self_id)))

    def _taken(self, self_id: str) -> set[str]:
        members = {m.name for m in self._roster.members.values() if m.id != self_id}
        hellos = [self._connections.hello_of(peer) for peer in self._connections.connected()]
        trusted = {entry.name for entry in self._trust.trusted.values()}
        return members | trusted | {hello.name for hello in hellos if hello is not None}

    def _rename(self, name: str) -> None:
        previous = self._file.name
        self._keep(lambda: self._file.rename(name))
        self._roster.describe(name=name)
        self._hooks.emit(Renamed(name, previous))

    def _keep(self, write: Callable[[], None]) -> None:
        try:
            write()
        except UserError as error:  # a full disk: not worth a membership
            self._hooks.warn(f"{error}: names may be those of before after the next start")
