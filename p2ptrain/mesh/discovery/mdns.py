"""Finds other devices by DNS-SD over multicast DNS (RFC 6763, RFC 6762), with python-zeroconf.

    <first 16 hex digits of the id>._p2ptrain._tcp.local.   TXT  v=<protocol version>  id=<id>

Nothing else is announced: no name of a user, a host or a model. What is received is only a hint.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import zeroconf
from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from p2ptrain._version import PROTOCOL_VERSION
from p2ptrain.errors import UserError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.discovery.addresses import (
    INSTANCE_DIGITS,
    SERVICE,
    DiscoveredDevice,
    may_be_ours,
    parse,
    service_name,
)
from p2ptrain.mesh.discovery.interfaces import is_ipv6, without_scope

log = get_logger(__name__)

OLDEST_ZEROCONF = (0, 149, 17)
"""Older ones can be made to use any amount of memory and time by one device on the network."""

RESOLVES_LIMIT = 64
"""Most services being resolved at one time; those found beyond it wait for their next announcement.
Trusted devices always have their turn."""

RESOLVE_SECONDS = 3.0


class Discovery(Protocol):
    """What the mesh needs of any way of discovery."""

    async def start(
        self, device_id: str, port: int, on_found: Callable[[DiscoveredDevice], None]
    ) -> None:
        """Announce this device, `device_id`, at `port`; report each device that announces a change.

        This device's own announcement may come back too: a copy of its identity looks the same.
        """

    async def close(self) -> None:
        """Withdraw the announcement and stop."""


class NoDiscovery:
    """For networks and tests that give devices each other's addresses."""

    async def start(
        self, device_id: str, port: int, on_found: Callable[[DiscoveredDevice], None]
    ) -> None:
        """Nothing to announce."""

    async def close(self) -> None:
        """Nothing to withdraw."""


def check_zeroconf_version(version: str = zeroconf.__version__) -> None:
    """Refuse a zeroconf with known holes.

    Raises:
        UserError: it is older than OLDEST_ZEROCONF.
    """
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST_ZEROCONF:
        oldest = ".".join(map(str, OLDEST_ZEROCONF))
        raise UserError(
            f"the installed zeroconf {version} has known security holes: "
            f"run `pip install 'zeroconf>={oldest}'`"
        )


class MdnsDiscovery:
    """Announces this device and listens for others on the given interfaces.

    Attributes:
        resolving: what looks up the service of each name now.
    """

    def __init__(self, ips: Sequence[str], trusted_ids: Callable[[], Iterable[str]]) -> None:
        """Prepare; `ips` are this machine's addresses to use, at least one."""
        check_zeroconf_version()
        self._ips = list(ips)
        self._trusted_ids = trusted_ids
        self.resolving: dict[str, asyncio.Task[None]] = {}
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._announcing: asyncio.Future[None] | None = None
        self._on_found: Callable[[DiscoveredDevice], None] = lambda _candidate: None

    async def start(
        self, device_id: str, port: int, on_found: Callable[[DiscoveredDevice], None]
    ) -> None:
        self._on_found = on_found
        self._zeroconf = listen_on(self._ips)
        # Uniqueness needs no probing (0.75 s): the name is a hash of this device's key.
        announcing = await self._zeroconf.async_register_service(
            service_of(device_id, port, self._ips), cooperating_responders=True
        )
        self._announcing = asyncio.ensure_future(announcing)
        self._browser = AsyncServiceBrowser(
            self._zeroconf.zeroconf, SERVICE, handlers=[self.on_change]
        )

    async def close(self) -> None:
        for task in self.resolving.values():
            task.cancel()
        await asyncio.gather(*self.resolving.values(), return_exceptions=True)
        if self._announcing is not None:
            self._announcing.cancel()
            await asyncio.gather(self._announcing, return_exceptions=True)
        if self._browser is not None:
            await self._browser.async_cancel()
        if self._zeroconf is not None:
            await self._zeroconf.async_unregister_all_services()
            await self._zeroconf.async_close()

    def on_change(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        """zeroconf has heard of a service: look it up, with few others at a time."""
        gone = state_change is ServiceStateChange.Removed
        if gone or name in self.resolving:
            return
        if len(self.resolving) >= RESOLVES_LIMIT and not self._may_be_trusted(name):
            log.debug("discovery_overloaded", name=name[:80])
            return
        task = asyncio.create_task(self._resolve(zeroconf, name), name=f"resolve {name}")
        self.resolving[name] = task
        task.add_done_callback(lambda _task: self.resolving.pop(name, None))

    async def _resolve(self, zeroconf: Zeroconf, name: str) -> None:
        if not may_be_ours(name):  # zeroconf raises for some of what strangers may announce
            log.debug("discovery_of_others", name=name[:80])
            return
        info = AsyncServiceInfo(SERVICE, name)
        if not await info.async_request(zeroconf, RESOLVE_SECONDS * 1000):
            log.debug("discovery_unresolved", name=name[:80])
            return
        candidate = parse(name, info.properties, addresses_of(info), info.port)
        if candidate is not None:
            self._on_found(candidate)

    def _may_be_trusted(self, name: str) -> bool:
        """Whether it is exactly the name of one: an announcer can choose how a name begins."""
        return any(name == service_name(known) for known in self._trusted_ids())


def service_of(device_id: str, port: int, ips: Sequence[str]) -> AsyncServiceInfo:
    """What is announced of this device: nothing of its person or its host's name."""
    instance = device_id[:INSTANCE_DIGITS]
    return AsyncServiceInfo(
        SERVICE,
        service_name(device_id),
        addresses=list(map(_packed, ips)),
        port=port,
        properties={"v": str(PROTOCOL_VERSION), "id": device_id},
        server=f"{instance}.local.",
    )


def listen_on(ips: Sequence[str]) -> AsyncZeroconf:
    """Multicast DNS on these addresses of this machine, at least one. Raises OSError."""
    by_ipv4 = not all(map(is_ipv6, ips))
    by_ipv6 = any(map(is_ipv6, ips))
    version = IPVersion.V4Only if not by_ipv6 else IPVersion.All if by_ipv4 else IPVersion.V6Only
    try:
        return AsyncZeroconf(interfaces=list(ips), ip_version=version)
    except RuntimeError as error:  # zeroconf's for an address that is gone since it was read
        raise OSError(errno.EADDRNOTAVAIL, str(error)) from error


def addresses_of(info: AsyncServiceInfo) -> list[str]:
    """What a service announces: IPv4 before IPv6, whose link-local ones have their scope.

    Loopback last: it leads to the announcing device only from its own machine.
    """
    ips = info.parsed_scoped_addresses(IPVersion.All)
    return sorted(ips, key=lambda ip: (ip.startswith("127."), is_ipv6(ip), "%" in ip))


def _packed(ip: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if is_ipv6(ip) else socket.AF_INET, without_scope(ip))
