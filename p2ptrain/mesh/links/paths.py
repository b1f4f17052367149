"""Several ways to one device (LAN, Wi-Fi, a VPN): the fastest that works carries the tensors.

A link uses one path, at first the one that answered first. Soon after, and at intervals while the
device has other addresses, the device of smaller id measures each path by a connection of its own:

    dialler                                   the other device
    TLS handshake  ---------------------->
    path {}, path {}, ... path {"ask"}  -->   (nothing is kept of them)
                                        <--   path {}              acknowledged: seconds and bytes

The link moves to a path that is at least `better_factor` times as fast: a dial as after a lost
link, which replaces it. A path that dies is left as soon as the device is suspected. Which side
measures, and when, is decided by connections.py; link_probe.py has both ends of a measurement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from p2ptrain.aio.tasks import TaskScope
from p2ptrain.errors import PeerError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.discovery.addresses import AddressBook
from p2ptrain.mesh.discovery.interfaces import without_scope
from p2ptrain.mesh.links.link_probe import Dial, PathConfig, PathProbe
from p2ptrain.mesh.links.peer_link import PeerLink
from p2ptrain.net.link.link import Link
from p2ptrain.net.link.stream import Address
from p2ptrain.net.transport.dial import Backoff


@dataclass(frozen=True, slots=True)
class ConnectionTimes:
    """How patient connections are, in seconds.

    Attributes:
        hello_seconds: for a hello or its answer. Raise: patience with frozen devices.
        crossing_seconds: the device of the greater id waits this long before it dials, so that
            dials rarely cross. Raise: slower where only it can dial.
        ask_old_seconds: for an answer over an old link when a new process shows up. Raise:
            slower restarts. Lower: a frozen process loses its identity to a copy.
        path_seconds: for an answer of a suspected device, before its link moves to another path;
            the device of the greater id waits `ask_old_seconds`. Lower: links move under load.
        goodbye_seconds: to send what is queued on a link that is stuck, when leaving.
    """

    hello_seconds: float = 5.0
    crossing_seconds: float = 0.05
    ask_old_seconds: float = 1.0
    path_seconds: float = 0.3
    goodbye_seconds: float = 1.0


class PathSchedule:
    """When to look at the paths to one device. Pure: time is an argument."""

    def __init__(self, config: PathConfig) -> None:
        self._config = config
        self._pause_seconds = config.again_seconds
        self._known: frozenset[Address] = frozenset()
        self._due: float | None = None

    def link_up(self, now: float) -> None:
        """A link came up, over whichever path."""
        self._due = now + self._config.first_seconds
        self._pause_seconds = self._config.again_seconds

    def heard(self, addresses: Sequence[Address], now: float) -> None:
        """The device may be at these: new ones are worth a look soon."""
        if not self._known.issuperset(addresses):
            self._known |= frozenset(addresses)
            self.link_up(now)

    def looked(self, now: float) -> None:
        """The paths have been measured."""
        self._due = now + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, self._config.rarest_seconds)

    def seconds_left(self, now: float) -> float | None:
        """Until the next look; 0 if it is due; None while there is no link."""
        return None if self._due is None else max(self._due - now, 0.0)


def other_paths(ip: str, addresses: Sequence[Address]) -> list[Address]:
    """Those of `addresses` that lead another way than `ip`.

    127.0.0.1 and ::1 are one way. To move between them for a measurement that other work on this
    machine disturbed gains nothing, and breaks off a round.
    """
    used = without_scope(ip)
    same = _LOOPBACK if used in _LOOPBACK else {used}
    return [address for address in addresses if without_scope(address[0]) not in same]


_LOOPBACK = frozenset({"127.0.0.1", "::1"})


def better_path(
    current: Address, rates: Mapping[Address, float], config: PathConfig
) -> Address | None:
    """The fastest path, if it is enough faster than the current one.

    Args:
        rates: measured bytes/s of the paths that work; the current one's may be missing.
    """
    others = {address: rate for address, rate in rates.items() if address != current}
    best = max(others, key=lambda address: others[address], default=None)
    if best is None or others[best] < config.better_factor * rates.get(current, 0.0):
        return None
    return best


log = get_logger(__name__)

Redial: TypeAlias = Callable[[str, Sequence[Address], PeerLink | None], Awaitable[None]]
"""(peer id, addresses, the link that gives way): dials and says hello. Raises PeerError."""


@dataclass(slots=True, eq=False)
class KnownPeer:
    """What is known of one trusted device; `current` is its link that is up."""

    backoff: Backoff
    paths: PathSchedule
    addresses: AddressBook = field(default_factory=AddressBook)
    current: PeerLink | None = None
    last_token: str = ""
    dialling: bool = False  # our hello is on its way
    measuring: bool = False  # its paths
    moving: bool = False  # to another path
    missed: bool = False  # the last link was lost and no dial has been tried since
    at: tuple[Address, ...] = ()  # where it listened, as it said on its last link
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """It has a link that is up."""
        return self.current is not None and self.current.is_up

    def listens_at(self) -> Address | None:
        """Where the device listens on the path that its link takes."""
        link = self.current
        if link is None or link.theirs is None or (ends := link.link.ends()) is None:
            return None
        return ends[1], link.theirs.port

    def elsewhere(self) -> list[Address]:
        """The addresses of a device on other paths than its link's; none without a link."""
        current = self.listens_at()
        if current is None:
            return []
        return other_paths(current[0], self.addresses.all())


class PathMover:
    """Measures the paths of linked devices, and moves their links."""

    def __init__(
        self,
        tasks: TaskScope,
        dial: Dial,
        redial: Redial,
        config: PathConfig,
        answers: Callable[[str], Awaitable[bool]],
    ) -> None:
        """Nothing is measured before `measure`.

        Args:
            dial: for connections that only measure.
            redial: for the new link.
            answers: (peer id) whether it answers over its link; both sides may see a path die, so
                one of them waits for longer.
        """
        self._tasks = tasks
        self._dial = dial
        self._redial = redial
        self._config = config
        self._answers = answers

    def measure(self, peer_id: str, peer: KnownPeer) -> None:
        """Measure the device's paths in a task, unless one is at work already."""
        if peer.elsewhere() and not peer.measuring:
            peer.measuring = True
            self._tasks.spawn(self._look_at_paths(peer_id, peer), "measure paths")

    def leave(self, peer_id: str, peer: KnownPeer) -> None:
        """Move a device's link to any other path in a task, unless it answers over that link."""
        if peer.current is not None and not peer.moving and peer.elsewhere():
            peer.moving = True
            self._tasks.spawn(self._leave_path(peer_id, peer, peer.current), "another path")

    async def _look_at_paths(self, peer_id: str, peer: KnownPeer) -> None:
        """Measure the current path and the others; move the link to a much faster one."""
        link, current = peer.current, peer.listens_at()
        try:
            if link is None or current is None:
                return
            others = peer.elsewhere()[: self._config.most_paths]
            rates = await self._measure_all(peer_id, [current, *others])
            seen = link.link.statistics().link_bytes_per_s
            if current in rates and seen is not None:
                rates[current] = max(rates[current], seen)
            best = better_path(current, rates, self._config)
            if best is not None and peer.current is link:
                log.info("better_path", peer=peer_id[:16], at=best, rate=round(rates[best]))
                await self._move(peer_id, link, [best])
        finally:
            peer.measuring = False

    async def _measure_all(
        self, peer_id: str, addresses: Sequence[Address]
    ) -> dict[Address, float]:
        """Of those that work, bytes/s."""
        rates = {}
        for address in addresses:
            try:
                rates[address] = await self._measure(peer_id, address)
            except PeerError as error:
                log.debug("path_not_measured", peer=peer_id[:16], at=address, why=str(error))
        return rates

    async def _measure(self, peer_id: str, address: Address) -> float:
        """Bytes/s over a connection of its own. Raises PeerError."""
        probe = PathProbe()
        link = await self._dial([address], peer_id, lambda peer: Link(peer, probe))
        try:
            return await probe.bytes_per_s(link, self._config)
        finally:
            link.abort("the path is measured")

    async def _leave_path(self, peer_id: str, peer: KnownPeer, link: PeerLink) -> None:
        try:
            if not await self._answers(peer_id) and peer.current is link:
                await self._move(peer_id, link, peer.elsewhere())
        finally:
            peer.moving = False

    async def _move(self, peer_id: str, link: PeerLink, addresses: Sequence[Address]) -> None:
        try:
            await self._redial(peer_id, addresses, link)
        except PeerError as error:
            log.info("path_not_changed", peer=peer_id[:16], why=str(error))
