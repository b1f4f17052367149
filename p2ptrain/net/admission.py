"""How many strangers may be connected at once.

Until its certificate is known a connection costs us memory and a timer, and anybody on the network
can open thousands. So few are kept for one address and few in all, and the newest pushes out the
oldest: a flood of silent connections then cannot lock out a paired device, which needs its place
for some milliseconds only.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

PER_ADDRESS_LIMIT = 8
TOTAL_LIMIT = 64

Key = TypeVar("Key")


class Admission(Generic[Key]):
    """Pure bookkeeping of the strangers who are here."""

    def __init__(
        self, per_address_limit: int = PER_ADDRESS_LIMIT, total_limit: int = TOTAL_LIMIT
    ) -> None:
        self._per_address_limit = per_address_limit
        self._total_limit = total_limit
        self._address: dict[Key, str] = {}  # in the order of arrival
        self._count: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._address)

    def admit(self, key: Key, address: str) -> Key | None:
        """Take in the connection `key`; returns the one that must be cut for it, if any."""
        evicted = self._to_evict(address)
        if evicted is not None:
            self.release(evicted)
        self._address[key] = address
        self._count[address] += 1
        return evicted

    def release(self, key: Key) -> None:
        """`key` has shown who it is, or has gone; harmless when repeated."""
        address = self._address.pop(key, None)
        if address is not None:
            self._count[address] -= 1
            self._count += Counter()  # forget the addresses that have none left

    def _to_evict(self, address: str) -> Key | None:
        if self._count[address] >= self._per_address_limit:
            crowded = address
        elif len(self._address) >= self._total_limit:
            crowded = self._count.most_common(1)[0][0]
        else:
            return None
        return next(key for key, where in self._address.items() if where == crowded)
