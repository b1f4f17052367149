"""Which of this machine's addresses take part in discovery.

By default every interface that is up and leads to other devices, for IPv4 and IPv6. Interfaces of
containers and virtual machines are skipped; loopback is used only where there is nothing else.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from p2ptrain.errors import OptionError

_VIRTUAL_PREFIXES = (
    "docker",
    "br-",
    "virbr",
    "vmnet",
    "vboxnet",
    "podman",
    "cni",
    "flannel",
    "lxcbr",
    "lxdbr",
    "vethernet",  # Windows' Hyper-V switches
    "utun",  # macOS' own tunnels (iCloud relay), which lead to no device of the household
    "awdl",  # macOS' AirDrop: addresses that no other system can dial
    "llw",
    "anpi",
)


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """One address of an interface that is up; an IPv6 one of one link has its scope behind a %."""

    interface: str
    ip: str

    @property
    def is_loopback(self) -> bool:
        """Whether it leads to this machine only."""
        return ipaddress.ip_address(self.ip).is_loopback

    @property
    def is_virtual(self) -> bool:
        """Whether containers or virtual machines made it."""
        return self.interface.lower().startswith(_VIRTUAL_PREFIXES)


def machine_addresses() -> list[InterfaceAddress]:
    """The addresses of all interfaces that are up and can be used now; IPv4 first."""
    statistics = interface_statistics()
    found = [
        InterfaceAddress(interface, entry.address)
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and _is_up(interface, statistics)
    ]
    return sorted(filter(_is_usable, found), key=lambda address: _rank(address.ip))


def interface_statistics() -> Mapping[str, Any]:
    """What psutil says of each interface (`isup`, `speed`).

    Empty where the system has no such question (SIOCETHTOOL): gVisor, proot on phones, emulators.
    """
    try:
        return psutil.net_if_stats()
    except OSError:
        return {}


def choose(wanted: Sequence[str], available: Sequence[InterfaceAddress]) -> list[str]:
    """The IPs to listen, advertise and look on.

    Args:
        wanted: `--interface` values: interface names or IPs; empty for the default.
        available: from `machine_addresses`.

    Raises:
        OptionError: a wanted one is not there.
    """
    if wanted:
        return list(dict.fromkeys(ip for name in wanted for ip in _named(name, available)))
    outside = [a for a in available if not a.is_loopback]
    real = [a for a in outside if not a.is_virtual]
    own = [a for a in available if not is_ipv6(a.ip)]  # loopback: IPv4's is enough
    return [a.ip for a in real or outside or own or available]


def dialable(ips: Iterable[str]) -> list[str]:
    """Those of a device's own IPs that mean the same on other devices.

    IPv6 only where there is no IPv4, since a device may have many of them; never loopback beside a
    network, which leads others to themselves; none of one link only, whose scope each device
    names in its own way.
    """
    anywhere = [ip for ip in ips if not ipaddress.ip_address(ip).is_link_local or not is_ipv6(ip)]
    outside = [ip for ip in anywhere if not ipaddress.ip_address(ip).is_loopback]
    ipv4 = [ip for ip in outside if not is_ipv6(ip)]
    return ipv4 or outside or anywhere


def is_ipv6(ip: str) -> bool:
    """Whether it is an IPv6 address."""
    return ":" in ip


def without_scope(ip: str) -> str:
    """The IPv6 address without the interface of this machine that it counts on."""
    return ip.partition("%")[0]


def _rank(ip: str) -> int:
    return is_ipv6(ip) + (is_ipv6(ip) and ipaddress.ip_address(ip).is_link_local)


def _named(name: str, available: Sequence[InterfaceAddress]) -> list[str]:
    found = [a.ip for a in available if name in (a.interface, a.ip, without_scope(a.ip))]
    if not found:
        there = ", ".join(f"{a.interface} ({a.ip})" for a in available) or "none"
        raise OptionError(f"there is no network interface {name!r} that is up; there are: {there}")
    return found


def _is_up(interface: str, statistics: Mapping[str, Any]) -> bool:
    # An interface without statistics is one that the system does not let us ask about.
    return interface not in statistics or bool(statistics[interface].isup)


def _is_usable(address: InterfaceAddress) -> bool:
    """An IPv6 address cannot be used for a second or two after it came (RFC 4862, 5.4)."""
    if not is_ipv6(address.ip):
        return True
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(socket.getaddrinfo(address.ip, 0, flags=socket.AI_NUMERICHOST)[0][4])
    except OSError:
        return False
    return True
