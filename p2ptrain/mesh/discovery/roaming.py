"""Follows addresses that change: this machine's own, and those behind `--peer HOST`.

A laptop moves, Wi-Fi comes up after the start. No portable interface reports a change of addresses,
so they are read at an interval. Discovery restarts on the new ones, and with `--interface` the
listener follows them too; without it a device listens on all addresses. Links need no such care:
broken ones are dialled again.

A device may start before it has a network, and so without a name server; later a name may lead to
another address. So names are resolved in the background and again while devices are missing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence

from p2ptrain.errors import LinkClosed, OptionError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.discovery.addresses import DiscoveredDevice
from p2ptrain.mesh.discovery.interfaces import InterfaceAddress, choose, dialable, machine_addresses
from p2ptrain.mesh.discovery.mdns import Discovery, MdnsDiscovery, NoDiscovery
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.net.link.stream import Address
from p2ptrain.net.transport.sockets import host

log = get_logger(__name__)

LOOK_SECONDS = 3.0
"""Reading the addresses takes about a millisecond. Longer: found later on a new network."""


class LocalAddresses:
    """Where this device can be reached.

    Attributes:
        ips: IPv4 addresses, then IPv6 ones, possibly none.
    """

    def __init__(
        self, wanted: Sequence[str], read: Callable[[], list[InterfaceAddress]] = machine_addresses
    ) -> None:
        """`wanted`: `--interface` values. Raises OptionError where one of them is not there."""
        self._wanted = wanted
        self._read = read
        self.ips = choose(wanted, read())

    @property
    def published(self) -> list[str]:
        """Those that a hello names to other devices."""
        return dialable(self.ips)

    @property
    def shown(self) -> str:
        """The one shown to the user."""
        return next(iter([*self.published, *self.ips]), "127.0.0.1")

    def refresh(self) -> bool:
        """Read them again; whether they have changed."""
        ips = self._there()
        changed, self.ips = ips != self.ips, ips
        return changed

    def _there(self) -> list[str]:
        """Of the wanted interfaces those that are up now: another one may be down."""
        available = self._read()
        if not self._wanted:
            return choose((), available)
        ips: list[str] = []
        for name in self._wanted:
            try:
                ips += choose((name,), available)
            except OptionError as error:
                log.info("interface_gone", why=str(error))
        return list(dict.fromkeys(ips))


class RoamingDiscovery:
    """A `Discovery` that restarts where this machine's addresses change.

    Args:
        own: refreshed from here.
        make: discovery on given addresses.
        warn: shows the user a warning.
    """

    def __init__(
        self,
        own: LocalAddresses,
        make: Callable[[Sequence[str]], Discovery],
        warn: Callable[[str], None],
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._own = own
        self._make = make
        self._warn = warn
        self._look_seconds = look_seconds
        self._inner: Discovery = NoDiscovery()
        self._begun_on: Sequence[str] = ()
        self._watching: asyncio.Task[None] | None = None

    async def start(
        self, device_id: str, port: int, on_found: Callable[[DiscoveredDevice], None]
    ) -> None:
        """See `Discovery`. Without any network it waits for one."""
        await self._begin(device_id, port, on_found)
        watch = self._watch(device_id, port, on_found)
        self._watching = asyncio.create_task(watch, name="watch this machine's addresses")

    async def close(self) -> None:
        """See `Discovery`."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._inner.close()

    async def _watch(
        self, device_id: str, port: int, on_found: Callable[[DiscoveredDevice], None]
    ) -> None:
        while True:
            await asyncio.sleep(self._look_seconds)  # the period of looking
            self._own.refresh()
            if self._own.ips != self._begun_on:  # who else refreshes may have seen it first
                log.info("addresses_changed", ips=self._own.ips)
                inner, self._inner = self._inner, NoDiscovery()
                await inner.close()
                await self._begin(device_id, port, on_found)

    async def _begin(
        self, device_id: str, port: int, on_found: Callable[[DiscoveredDevice], None]
    ) -> None:
        ips = self._begun_on = self._own.ips
        if not ips:
            self._warn("No network: waiting for one.")
            return
        if all(map(_is_loopback, ips)):
            self._warn("No network: only programs on this device find each other.")
        self._inner = self._make(ips)
        try:
            await self._inner.start(device_id, port, on_found)
        except OSError as error:
            inner, self._inner = self._inner, NoDiscovery()
            await inner.close()
            self._warn(
                f"multicast cannot be used at {', '.join(ips)} ({error.strerror or error}): run "
                "`p2ptrain doctor`, or give --peer HOST"
            )


def _is_loopback(ip: str) -> bool:
    return ip.startswith("127.") or ip == "::1"


def over_mdns(
    own: LocalAddresses, trusted_ids: Callable[[], Iterable[str]], warn: Callable[[str], None]
) -> RoamingDiscovery:
    """Discovery by multicast DNS wherever this machine's addresses lead."""
    return RoamingDiscovery(own, lambda ips: MdnsDiscovery(ips, trusted_ids), warn)


async def follow_addresses(
    own: LocalAddresses,
    move: Callable[[Sequence[str]], None],
    warn: Callable[[str], None],
    look_seconds: float = LOOK_SECONDS,
) -> None:
    """Listen where `own` leads, until cancelled; an interface that is gone is waited for.

    Args:
        own: refreshed from here.
        move: `Listener.move`.
        warn: shows the user a warning, once however often it happens.
        look_seconds: between two looks.
    """
    while True:
        await asyncio.sleep(look_seconds)  # the period of looking
        own.refresh()
        if not own.ips:
            continue
        try:
            move(own.ips)
        except OptionError as error:  # tried again at the next look
            warn(f"{error}: other devices cannot connect there")


async def resolve_peer(peer: Address) -> list[Address]:
    """The addresses of a host name or IP; IPv4 first.

    Raises:
        LinkClosed: the name is unknown, or no name server can be reached now.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(*peer, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LinkClosed(f"--peer {peer[0]}: no such host now ({error.strerror})") from error
    hosts = dict.fromkeys(host(entry[4]) for entry in found)
    return [(ip, peer[1]) for ip in sorted(hosts, key=lambda ip: ":" in ip)]


PEER_LOOK_SECONDS = 10.0
"""As long as the longest pause between two dials of a device. Longer: found later."""


class StaticPeers:
    """Looks up `peers` for as long as `run` runs.

    Args:
        found: takes all addresses found, when they are others than before.
        is_needed: whether a device is missing.
        resolve: the addresses of a name or an IP. Raises LinkClosed where there are none now.
    """

    def __init__(
        self,
        peers: Sequence[Address],
        found: Callable[[Sequence[Address]], None],
        is_needed: Callable[[], bool],
        notices: WarnOnce,
        look_seconds: float = PEER_LOOK_SECONDS,
        resolve: Callable[[Address], Awaitable[list[Address]]] = resolve_peer,
    ) -> None:
        self._peers = peers
        self._found = found
        self._is_needed = is_needed
        self._notices = notices
        self._look_seconds = look_seconds
        self._resolve = resolve
        self._known: dict[Address, list[Address]] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        while self._peers:
            if self._is_needed() or len(self._known) < len(set(self._peers)):
                await asyncio.gather(*(self._look_up(peer) for peer in self._peers))
            await asyncio.sleep(self._look_seconds)  # the period of looking

    async def _look_up(self, peer: Address) -> None:
        """What is found counts at once: the look-up of another name may take half a minute."""
        try:
            found = await self._resolve(peer)
        except LinkClosed as error:  # what was known of it before may still be right
            self._notices.warn(f"{error}: trying again while devices are missing")
            return
        if found != self._known.get(peer):
            self._known[peer] = found
            self._found([at for known in self._peers for at in self._known.get(known, ())])
