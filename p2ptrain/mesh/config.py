"""What a user or an app may choose about this device's membership."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from p2ptrain.errors import OptionError
from p2ptrain.mesh.election.terms import ElectionConfig
from p2ptrain.mesh.links.paths import ConnectionTimes
from p2ptrain.mesh.membership.membership_config import HOME_LAN, MembershipConfig
from p2ptrain.mesh.trust.pairing_window import PairingWindow

DEFAULT_PORT = 47300
"""Where a device listens unless the port is taken, so that `--peer HOST` needs no port. Any fixed
number would do; a second device on the same machine takes any free port instead."""


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """One device's configuration.

    Attributes:
        state_dir: its private folder; made if it is not there.
        name: as its user calls it; None keeps the one from last time.
        code: eight digits typed by its user, in any writing; None makes one up where no device
            is trusted yet.
        window: a pairing window to go on with, on the running loop's clock; `code` goes before.
        peers: addresses "HOST" or "HOST:PORT" for networks that block multicast.
        interfaces: interface names or IPs; empty for all that are useful.
        port: to listen at, 0 for any free one; None takes DEFAULT_PORT or, if that is taken, any.
        info: what the device says of itself, see `Member.info`.
        discovery: False neither announces nor looks for anything by multicast.
        membership, election, times: see there.
    """

    state_dir: Path
    name: str | None = None
    code: str | None = None
    window: PairingWindow | None = None
    peers: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    port: int | None = None
    info: Mapping[str, int | float | str] = field(default_factory=dict)
    discovery: bool = True
    membership: MembershipConfig = HOME_LAN
    election: ElectionConfig = field(default_factory=ElectionConfig)
    times: ConnectionTimes = field(default_factory=ConnectionTimes)


def parse_peer(text: str) -> tuple[str, int]:
    """`--peer`'s HOST, HOST:PORT or [IPV6]:PORT.

    Raises:
        OptionError: it is none of these.
    """
    host, port = text.strip(), str(DEFAULT_PORT)
    if host.startswith("["):
        host, _, rest = host[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
    if not _is_host(host) or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise OptionError(f"--peer takes HOST or HOST:PORT, such as 192.168.1.20, not {text!r}")
    return host, int(port)


def peer_text(host: str, port: int) -> str:
    """HOST:PORT or [IPV6]:PORT, as `parse_peer` and addresses of the web have it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_host(host: str) -> bool:
    """A name or an IP: with colons in it only an IPv6 address, perhaps with a scope."""
    if ":" not in host:
        return _is_name(host)
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _is_name(host: str) -> bool:
    """Whether it can be looked up at all."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return bool(host) and host.isprintable() and " " not in host
