"""The IP addresses behind what a person gave with `--peer`."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from p2ptrain.errors import LinkClosed
from p2ptrain.mesh.addresses import Address


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
    hosts = dict.fromkeys(_host(entry[4]) for entry in found)
    return [(host, peer[1]) for host in sorted(hosts, key=lambda host: ":" in host)]


def _host(address: tuple[Any, ...]) -> str:
    """The IP of a socket's address; of a link-local one with its scope, which stands beside it."""
    host = str(address[0])
    scope = address[3] if len(address) == 4 else 0
    return f"{host}%{scope}" if scope and "%" not in host else host
