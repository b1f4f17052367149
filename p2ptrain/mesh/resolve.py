"""The IP addresses behind what a person gave with `--peer`."""

from __future__ import annotations

import asyncio
import socket

from p2ptrain.errors import OptionError
from p2ptrain.mesh.addresses import Address


async def resolve(peer: Address) -> list[Address]:
    """The addresses of a host name or IP; IPv4 first.

    Raises:
        OptionError: the name is unknown.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(*peer, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OptionError(f"--peer {peer[0]}: no such host ({error.strerror})") from error
    hosts = dict.fromkeys(str(entry[4][0]) for entry in found)
    return [(host, peer[1]) for host in sorted(hosts, key=lambda host: ":" in host)]
