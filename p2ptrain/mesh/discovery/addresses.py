"""Addresses of a device: those that worked come first, hints follow, both are bounded.

Hints come from discovery and from other members, so any host on the network may add wrong ones.
They never displace an address at which the device has proved its identity.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field

PROVEN_LIMIT = 4

HINTS_LIMIT = 8

SCOPE_LIMIT_CHARACTERS = 16
"""Longest name of an interface, as in "fe80::1%eth0"; systems allow 15 characters."""

Address = tuple[str, int]


@dataclass(slots=True)
class AddressBook:
    """The addresses of one device, most promising first."""

    proven: list[Address] = field(default_factory=list)
    hints: list[Address] = field(default_factory=list)

    def all(self) -> list[Address]:
        """In the order in which to try them; a fresh hint may be newer than what worked."""
        return list(dict.fromkeys([*self.hints[:1], *self.proven, *self.hints[1:]]))

    def add_hints(self, addresses: Iterable[Address]) -> None:
        """Newest first; unusable ones are dropped."""
        usable = [address for address in addresses if is_usable(address)]
        self.hints = list(dict.fromkeys([*usable, *self.hints]))[:HINTS_LIMIT]

    def prove(self, addresses: Iterable[Address]) -> bool:
        """The device itself named these over a link; whether anything changed."""
        named = [address for address in addresses if is_usable(address)]
        proven = list(dict.fromkeys([*named, *self.proven]))[:PROVEN_LIMIT]
        changed, self.proven = proven != self.proven, proven
        return changed


def is_usable(address: Address) -> bool:
    """Whether it is a unicast IP and a port one can connect to."""
    host, port = address
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and not _is_scope(ip.scope_id):
        return False
    return 0 < port < 65536 and not (ip.is_multicast or ip.is_unspecified)


def _is_scope(scope: str | None) -> bool:
    """Whether Python's look-up takes it: it reads what has a scope as a host's name, by IDNA."""
    if scope is None:
        return True
    plain = scope.isascii() and scope.isprintable() and all(scope.split("."))
    return plain and len(scope) <= SCOPE_LIMIT_CHARACTERS
