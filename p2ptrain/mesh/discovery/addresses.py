"""Where devices may be: addresses that worked come first, hints follow, both are bounded.

Hints come from discovery and from other members, so any host on the network may add wrong ones.
They never displace an address at which the device has proved its identity, and only lead to a dial,
where the certificate decides. Trusted devices always have a place among those that discovery found.
Of the others the oldest makes room, so that a flood of invented services hides a real device for a
moment only.
"""

from __future__ import annotations

import ipaddress
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from p2ptrain.net.link.stream import Address

PROVEN_LIMIT = 4

HINTS_LIMIT = 8

SCOPE_LIMIT_CHARACTERS = 16
"""Longest name of an interface, as in "fe80::1%eth0"; systems allow 15 characters."""


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


CANDIDATES_LIMIT = 256

ADDRESSES_LIMIT = 8
"""Most addresses kept per device."""

SERVICE = "_p2ptrain._tcp.local."

INSTANCE_DIGITS = 16
"""Leading hex digits of the id that make a service's instance name."""

_ID = re.compile(r"[0-9a-f]{64}")

_NAME = re.compile(rf"[0-9a-f]{{{INSTANCE_DIGITS}}}\.{re.escape(SERVICE)}")

_PORTS = range(1, 65536)


@dataclass(frozen=True, slots=True)
class DiscoveredDevice:
    """A device that may be reachable.

    Attributes:
        id: as announced.
        addresses: (IP, port), most promising first.
        version: protocol version as announced, 0 where unreadable.
    """

    id: str
    addresses: tuple[tuple[str, int], ...]
    version: int


def service_name(device_id: str) -> str:
    """The one name that the device is announced by."""
    return f"{device_id[:INSTANCE_DIGITS]}.{SERVICE}"


def may_be_ours(name: str) -> bool:
    """Whether a device may be announced so: strangers announce any text, also what is no name."""
    return _NAME.fullmatch(name) is not None


def parse(
    name: str, properties: Mapping[bytes, bytes | None], ips: list[str], port: int | None
) -> DiscoveredDevice | None:
    """A service's record as a candidate, or None where it cannot be one of us."""
    device_id = (properties.get(b"id") or b"").decode("ascii", "replace")
    if not _ID.fullmatch(device_id) or name != service_name(device_id):
        return None
    if port not in _PORTS or port is None or not ips:
        return None
    version = (properties.get(b"v") or b"").decode("ascii", "replace")
    number = int(version) if version.isascii() and version.isdigit() and len(version) < 6 else 0
    return DiscoveredDevice(device_id, tuple((ip, port) for ip in ips[:ADDRESSES_LIMIT]), number)


class DiscoveredDevices:
    """The latest candidate of each device, at most CANDIDATES_LIMIT of them."""

    def __init__(self, is_trusted: Callable[[str], bool]) -> None:
        self._is_trusted = is_trusted
        self._candidates: OrderedDict[str, DiscoveredDevice] = OrderedDict()

    def __len__(self) -> int:
        return len(self._candidates)

    def get(self, device_id: str) -> DiscoveredDevice | None:
        """What that device announced last."""
        return self._candidates.get(device_id)

    def values(self) -> list[DiscoveredDevice]:
        """All candidates, the oldest first."""
        return list(self._candidates.values())

    def put(self, candidate: DiscoveredDevice) -> bool:
        """Keep the candidate; False where the table is full of trusted devices."""
        self._candidates.pop(candidate.id, None)
        if len(self._candidates) >= CANDIDATES_LIMIT and not self._make_room():
            return False
        self._candidates[candidate.id] = candidate
        return True

    def _make_room(self) -> bool:
        for device_id in self._candidates:
            if not self._is_trusted(device_id):
                del self._candidates[device_id]
                return True
        return False
