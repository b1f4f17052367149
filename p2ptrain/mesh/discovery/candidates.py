"""What discovery has received: bounded hints about which device may be where, never believed.

Any host on the network can announce anything, so a record only leads to a dial, where the
certificate decides. Trusted devices always have a place in the table. Among the others the oldest
makes room, so that a flood of invented services hides a real device for a moment only.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
