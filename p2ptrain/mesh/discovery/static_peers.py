"""The addresses behind `--peer HOST`, resolved again while devices are missing.

A device may start before it has a network, and so without a name server; later a name may lead to
another address. So names are resolved in the background and again from time to time.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

from p2ptrain.errors import LinkClosed
from p2ptrain.mesh.discovery.addresses import Address
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.net.transport.sockets import host


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


LOOK_SECONDS = 10.0
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
        look_seconds: float = LOOK_SECONDS,
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
