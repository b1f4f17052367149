"""Two processes with one identity, and two devices with one display name.

A copied state folder gives two processes the same identity, and both must not be members. A device
that receives its own announcement from elsewhere dials it; the hello shows which process is
younger, and that one ends (links/connections.py). A member's report of an older process is believed
no more than an announcement: only a process that proves our certificate is a copy. Any host can
name any addresses, so they are dialled one after the other, with a pause, and only the last report
waits.

Of two devices with one name, the one that started later takes NAME-2.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace

from p2ptrain.aio.tasks import TaskScope
from p2ptrain.errors import Error, UserError
from p2ptrain.events import Renamed
from p2ptrain.logs import get_logger
from p2ptrain.mesh.discovery.addresses import DiscoveredDevice
from p2ptrain.mesh.discovery.interfaces import without_scope
from p2ptrain.mesh.identity.device_record import DeviceRecord, DiskWriter
from p2ptrain.mesh.links.connections import Connections
from p2ptrain.mesh.links.hello import Hello, is_younger, refusal_of
from p2ptrain.mesh.membership.core_events import SelfChanged
from p2ptrain.mesh.membership_driver import MembershipDriver
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.mesh.trust.trust_store import TrustStore
from p2ptrain.net.link.stream import Address
from p2ptrain.net.message import Message

log = get_logger(__name__)

PAUSE_SECONDS = 5.0
"""Between two dials. Shorter: a copy behind invented ones is found sooner; longer: fewer dials."""


class IdentityClash:
    """See the module.

    Args:
        self_id: own id.
        note: takes note of a member that said so of a copy that is not there.
        sleep: waits for seconds.

    Attributes:
        dialling: what dials the copies that were announced, while it does.
    """

    def __init__(
        self,
        self_id: str,
        connections: Connections,
        tasks: TaskScope,
        note: Callable[[str], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._self_id = self_id
        self._connections = connections
        self._tasks = tasks
        self._note = note
        self._sleep = sleep
        self._waiting: Sequence[Address] = ()  # where to dial next
        self._reporter = ""  # the member that said so, if one did
        self.dialling: asyncio.Task[None] | None = None

    def heard(self, candidate: DiscoveredDevice, own_ips: Collection[str], own_port: int) -> None:
        """Our own announcement, or that of a copy; `own_ips`: where this process listens."""
        own = {(without_scope(ip), own_port) for ip in own_ips}
        others = [
            (ip, port) for ip, port in candidate.addresses if (without_scope(ip), port) not in own
        ]
        if others:
            self._dial_next(others, "")

    async def refused(self, peer_id: str, message: Message) -> None:
        """A member says over a link that is up that it found an older process of our identity."""
        self.suspected(peer_id, refusal_of(message).elsewhere)

    def suspected(self, peer_id: str, addresses: Sequence[Address]) -> None:
        """A member says so, and where that process listens."""
        log.warning("identity_copied", by=peer_id[:16], at=addresses)
        if addresses:
            self._dial_next(addresses, peer_id)
        else:
            self._note(peer_id)

    def _dial_next(self, addresses: Sequence[Address], reporter: str) -> None:
        self._waiting, self._reporter = addresses, reporter
        if self.dialling is None or self.dialling.done():
            self.dialling = self._tasks.spawn(self._dial_waiting(), "dial copies")

    async def _dial_waiting(self) -> None:
        while self._waiting:
            addresses, self._waiting = self._waiting, ()
            reporter = self._reporter
            if not await self._found(addresses) and reporter:
                self._note(reporter)
            await self._sleep(PAUSE_SECONDS)

    async def _found(self, addresses: Sequence[Address]) -> bool:
        """Whether one with our identity was there; the younger of the two ends by then."""
        try:
            await self._connections.dial(self._self_id, addresses)
        except Error as error:
            log.info("own_identity_elsewhere", addresses=addresses, why=str(error))
            return False
        return True


_LOSS = "after the next start devices may have older names"


class NameKeeper:
    """Watches the names of all others. Names that cannot be written count until the end."""

    def __init__(
        self,
        file: DeviceRecord,
        trust: TrustStore,
        connections: Connections,
        membership_driver: MembershipDriver,
        notices: WarnOnce,
        writer: DiskWriter,
    ) -> None:
        self._file = file
        self._trust = trust
        self._connections = connections
        self._membership_driver = membership_driver
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
        members = {m.name for m in self._membership_driver.members.values() if m.id != self_id}
        hellos = [self._connections.hello_of(peer) for peer in self._connections.connected()]
        trusted = {entry.name for entry in self._trust.trusted.values()}
        return members | trusted | {hello.name for hello in hellos if hello is not None}

    def _rename(self, name: str) -> None:
        previous = self._file.name
        try:
            self._file.rename(name)
        except UserError as error:
            self._notices.warn(f"{error}: {_LOSS}")
        self._membership_driver.handle(SelfChanged(name=name))
        self._notices.emit(Renamed(name, previous))


def must_rename(own: Hello, own_id: str, theirs: Hello, their_id: str) -> bool:
    """Whether this device is the one that gives way; the other side comes to the opposite.

    Args:
        own, theirs: the two hellos of one link, with the names that count now.
    """
    return own.name == theirs.name and is_younger(own, own_id, theirs, their_id)


def free_name(asked: str, taken: Collection[str]) -> str:
    """`asked`, or with the smallest free suffix from -2 on."""
    if asked not in taken:
        return asked
    number = 2
    while f"{asked}-{number}" in taken:
        number += 1
    return f"{asked}-{number}"
