"""Keeps this device's name unique: gives way to the device that had it first (rule: names.py)."""

from __future__ import annotations

from dataclasses import replace

from p2ptrain.errors import UserError
from p2ptrain.mesh.connections import Connections
from p2ptrain.mesh.device_file import DeviceFile
from p2ptrain.mesh.disk_writer import DiskWriter
from p2ptrain.mesh.names import free_name, must_rename
from p2ptrain.mesh.notices import Notices
from p2ptrain.mesh.roster import Roster
from p2ptrain.mesh.trust_store import TrustStore
from p2ptrain.observe.events import Renamed

_LOSS = "after the next start devices may have older names"


class NameKeeper:
    """Watches the names of all others. Names that cannot be written count until the end."""

    def __init__(
        self,
        file: DeviceFile,
        trust: TrustStore,
        connections: Connections,
        roster: Roster,
        notices: Notices,
        writer: DiskWriter,
    ) -> None:
        self._file = file
        self._trust = trust
        self._connections = connections
        self._roster = roster
        self._notices = notices
        self._writer = writer

    def heard(self, peer_id: str, self_id: str, name: str) -> None:
        """The device calls itself `name`: remember that, and give way if need be."""
        if self._trust.rename(peer_id, name):
            self._writer.soon(self._trust.save, _LOSS)
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
        try:
            self._file.rename(name)
        except UserError as error:
            self._notices.warn(f"{error}: {_LOSS}")
        self._roster.describe(name=name)
        self._notices.emit(Renamed(name, previous))
