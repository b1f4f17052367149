"""Listening sockets: IPv4 and IPv6, on all addresses or on given ones, all at one port."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Sequence

from p2ptrain.errors import OptionError

BACKLOG = 64
PORT_TRIES = 16
"""With any free port, one that is free on the first address may be taken on another."""


def bind_all(hosts: Sequence[str] | None, port: int) -> list[socket.socket]:
    """Non-blocking listening sockets at one port.

    Args:
        hosts: numeric addresses, IPv6 perhaps with a scope; None means every address there is.
        port: 0 for any free one.

    Raises:
        OptionError: the port is taken, or an address is not this device's.
    """
    wanted = list(hosts) if hosts is not None else _wildcards()
    tries = 1 if port else PORT_TRIES
    for attempt in range(tries):
        try:
            return _bind_at(wanted, port)
        except OSError as error:
            if attempt == tries - 1:
                raise OptionError(_why_not(wanted, port, error)) from error
    raise OptionError("no address to listen at was given")


def _why_not(hosts: Sequence[str], port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE and port:
        return f"port {port} of this device is taken: stop what uses it, or give another --port"
    where = f"port {port}" if port else "any port"
    return f"cannot listen at {where} of {', '.join(hosts)}: {error.strerror or error}"


def _wildcards() -> list[str]:
    return ["0.0.0.0", "::"] if _has_ipv6() else ["0.0.0.0"]


def _has_ipv6() -> bool:
    if not socket.has_ipv6:
        return False
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _bind_at(hosts: Sequence[str], port: int) -> list[socket.socket]:
    bound: list[socket.socket] = []
    try:
        for host in hosts:
            bound.append(_bind_one(host, port))
            port = bound[0].getsockname()[1]
    except OSError:
        for listening in bound:
            listening.close()
        raise
    return bound


def _bind_one(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICHOST
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":  # there it would let others take the port over
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.setblocking(False)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
