"""On which of this machine's addresses a household is looked for.

By default every interface that is up and leads to other devices; those that containers and virtual
machines leave behind are skipped, loopback is used only where there is nothing else. Multicast goes
by IPv4; where a network has IPv6 alone, others are told those addresses.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
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
)


@dataclass(frozen=True, slots=True)
class Address:
    """One address of an interface that is up."""

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


def machine_addresses(family: socket.AddressFamily = socket.AF_INET) -> list[Address]:
    """The addresses of all interfaces that are up, IPv4 unless another family is asked for."""
    statistics = psutil.net_if_stats()
    return [
        Address(interface, entry.address)
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == family and _is_up(interface, statistics)
    ]


def machine_ipv6_addresses() -> list[Address]:
    """The same for IPv6."""
    return machine_addresses(socket.AF_INET6)


def choose(wanted: Sequence[str], available: Sequence[Address]) -> list[str]:
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
    return [a.ip for a in real or outside or available]


def instead_of_loopback(ips: Sequence[str], ipv6: Sequence[Address]) -> list[str]:
    """The IPs that other devices are told where `ips` are loopback's.

    Those lead others to themselves: they would take this device's process for ended where nobody
    listens there, and for a stranger where they do. So they are told only without any network.

    Args:
        ips: from `choose`.
        ipv6: from `machine_addresses`; one that counts on its link only is told to nobody.
    """
    outside = [a for a in ipv6 if not a.is_loopback and not a.is_virtual]
    if not outside:
        return list(ips)
    return [a.ip for a in outside if not ipaddress.ip_address(a.ip).is_link_local]


def _named(name: str, available: Sequence[Address]) -> list[str]:
    found = [a.ip for a in available if name in (a.interface, a.ip)]
    if not found:
        there = ", ".join(f"{a.interface} ({a.ip})" for a in available) or "none"
        raise OptionError(f"there is no interface {name!r} that is up; there are: {there}")
    return found


def _is_up(interface: str, statistics: Mapping[str, Any]) -> bool:
    # An interface without statistics is one that the system does not let us ask about.
    return interface not in statistics or bool(statistics[interface].isup)
