"""Keeps this device's name unique: gives way to whoever had it first (names.py has the rule).

A device may change its name as often as it likes; all names are written to disk together, in a
thread, and at most once in a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from p2ptrain.errors import UserError
from p2ptrain.mesh.connections import Connections
from p2ptrain.mesh.device_file import DeviceFile
from p2ptrain.mesh.names import free_name, must_rename
from p2ptrain.mesh.roster import Roster
from p2ptrain.mesh.tasks import TaskScope, to_the_end
from p2ptrain.mesh.trust_store import TrustStore
from p2ptrain.observe.events import Event, Renamed

PAUSE_SECONDS = 5.0
"""Between two writes. Shorter: a liar keeps the disk busy; longer: names are those of before after
a power failure."""


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
        tasks: TaskScope,
        hooks: NameHooks,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._file = file
        self._trust = trust
        self._connections = connections
        self._roster = roster
        self._tasks = tasks
        self._hooks = hooks
        self._sleep = sleep
        self._is_new = False  # names that are not on disk yet
        self._saving: asyncio.Task[None] | None = None

    def heard(self, peer_id: str, self_id: str, name: str) -> None:
        """The device calls itself `name`: remember that, and give way if need be."""
        if self._trust.rename(peer_id, name):
            self._save_soon()
        link = self._connections.link(peer_id)
        if link is None or link.theirs is None or link.said is None:
            return
        theirs = replace(link.theirs, name=name)
        own = replace(link.said, name=self._file.name)
        if must_rename(own, self_id, theirs, peer_id):
            self._rename(free_name(self._file.asked_name, self._taken(self_id)))

    async def close(self) -> None:
        """Write what is not on disk yet."""
        if self._saving is not None:
            self._saving.cancel()
            await asyncio.wait([self._saving])
        if self._is_new:
            await self._save()

    def _save_soon(self) -> None:
        self._is_new = True
        if self._saving is None or self._saving.done():
            self._saving = self._tasks.spawn(self._keep_saving(), "write names")

    async def _keep_saving(self) -> None:
        while self._is_new:
            await self._save()
            await self._sleep(PAUSE_SECONDS)

    async def _save(self) -> None:
        self._is_new = False
        try:
            await to_the_end(self._trust.save)
        except UserError as error:  # a full disk: not worth a membership
            self._warn(error)

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
            self._warn(error)
        self._roster.describe(name=name)
        self._hooks.emit(Renamed(name, previous))

    def _warn(self, error: UserError) -> None:
        self._hooks.warn(f"{error}: after the next start devices may have older names")
