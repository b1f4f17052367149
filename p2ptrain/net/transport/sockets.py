"""Sockets: options of a link, each where the platform has it, and those that are listened at.

TCP_NOTSENT_LOWAT keeps what the kernel holds unsent small, so that a heartbeat does not queue
behind megabytes (it applies to writing, too: a full kernel queue makes the transport wait).
SO_RCVLOWAT spares wake-ups: at 100 Mbit/s packets come 0.12 ms apart, and being woken for each of
them costs most of what receiving costs.
TCP_USER_TIMEOUT ends a connection whose data are not acknowledged: without it Linux tries for many
minutes after a cable is pulled. Keepalive does the same for a silent one.
TCP_INFO shows what has arrived without the process knowing yet. Only Linux has it in this form
(struct tcp_info in include/uapi/linux/tcp.h; it only ever grows at its end).
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

from p2ptrain.errors import OptionError
from p2ptrain.logs import get_logger
from p2ptrain.net.link.stream import StreamArrival

NOTSENT_LOWAT_BYTES = 128 * 1024

USER_TIMEOUT_MS = 10_000

KEEPALIVE_IDLE_SECONDS = 5

KEEPALIVE_INTERVAL_SECONDS = 2

KEEPALIVE_PROBES = 3

_OPTIONS = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
    (socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", NOTSENT_LOWAT_BYTES),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", KEEPALIVE_IDLE_SECONDS),
    (socket.IPPROTO_TCP, "TCP_KEEPALIVE", KEEPALIVE_IDLE_SECONDS),  # macOS's name of KEEPIDLE
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", KEEPALIVE_INTERVAL_SECONDS),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", KEEPALIVE_PROBES),
)

_TCP_INFO_BYTES = 228

_BYTES_RECEIVED = struct.Struct("=128xQ")

_PACKETS_AHEAD = struct.Struct("=224xI")
"""tcpi_rcv_ooopack, since Linux 5.4."""

_log = get_logger(__name__)


def arrival(connection: socket.socket) -> StreamArrival | None:
    """What the kernel has received since the connection was made; None where it does not say."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None or sys.platform != "linux":
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, option, _TCP_INFO_BYTES)
    except OSError:
        return None
    if len(info) < _TCP_INFO_BYTES:
        return None
    (received_bytes,) = _BYTES_RECEIVED.unpack_from(info)
    (packets_ahead,) = _PACKETS_AHEAD.unpack_from(info)
    return StreamArrival(received_bytes, packets_ahead)


def limit_unsent(connection: socket.socket, count: int) -> None:
    """Let the kernel hold about `count` bytes that have not left this device."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None:
        with contextlib.suppress(OSError):  # refused: it stays as it was, which also works
            connection.setsockopt(socket.IPPROTO_TCP, option, count)


def wake_for(connection: socket.socket, count: int) -> bool:
    """Report the socket as readable from `count` bytes on; False where that cannot be had."""
    option = getattr(socket, "SO_RCVLOWAT", None)
    if option is None:
        return False
    try:
        connection.setsockopt(socket.SOL_SOCKET, option, count)
    except OSError:
        return False
    return True


def tune(connection: socket.socket) -> None:
    """Set every option this platform knows; one it refuses is logged and left at its default."""
    for level, name, value in _OPTIONS:
        option = getattr(socket, name, None)
        if option is None:
            continue
        try:
            connection.setsockopt(level, option, value)
        except OSError as error:
            _log.debug("socket option refused", option=name, error=str(error))


def host(address: tuple[Any, ...]) -> str:
    """The IP of a socket's address; of a link-local one with its scope, which stands beside it."""
    ip = str(address[0])
    scope = address[3] if len(address) == 4 else 0
    return f"{ip}%{scope}" if scope and "%" not in ip else ip


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
