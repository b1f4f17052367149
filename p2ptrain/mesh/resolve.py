"""The IP addresses behind what a person gave with `--peer`."""

from __future__ import annotations

import asyncio
import socket

from p2ptrain.errors import LinkClosed
from p2ptrain.mesh.addresses import Address
from p2ptrain.net.sockets import host


async def resolve(peer: Address) -> list[Address]:
    """The addresses of a host name or IP; IPv4 first.

    Raises:
        LinkClosed: the name is unknown, or there is nobody to ask now.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(*peer, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LinkClosed(f"--peer {peer[0]}: no such host now ({error.strerror})") from error
    hosts = dict.fromkeys(host(entry[4]) for entry in found)
    return [(ip, peer[1]) for ip in sorted(hosts, key=lambda ip: ":" in ip)]
