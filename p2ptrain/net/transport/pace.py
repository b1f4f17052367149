"""How often something that costs may happen: token buckets, one a key and one for all together.

Pure: time is an argument. What is not allowed now is waited for or refused by the code that asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

KEYS_LIMIT = 1024
"""Keys remembered; beyond that those go which have had no turn for the longest time."""

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Rate:
    """`burst` at once, and `per_second` in the long run."""

    per_second: float
    burst: float


@dataclass(slots=True)
class _RateBucket:
    """What is left of a rate."""

    left: float
    at: float

    def refill(self, rate: Rate, now: float) -> None:
        self.left = min(rate.burst, self.left + max(0.0, now - self.at) * rate.per_second)
        self.at = now

    def wait_seconds(self, rate: Rate) -> float:
        return max(0.0, 1.0 - self.left) / rate.per_second


class Pace(Generic[Key]):
    """Turns of keys.

    Args:
        each: of one key.
        in_all: of all keys together, but for those that are exempt.
    """

    def __init__(self, each: Rate, in_all: Rate) -> None:
        self._each = each
        self._in_all = in_all
        self._keys: dict[Key, _RateBucket] = {}  # who had a turn last stands last
        self._all = _RateBucket(in_all.burst, 0.0)

    def wait_seconds(self, key: Key, now: float, *, exempt: bool = False) -> float:
        """How long until `key` may have a turn; 0 now.

        Args:
            key: who asks.
            now: seconds on one clock, which never goes back.
            exempt: whether it needs no turn of `in_all`.
        """
        bucket = self._keys.get(key)
        wait = 0.0
        if bucket is not None:
            bucket.refill(self._each, now)
            wait = bucket.wait_seconds(self._each)
        if not exempt:
            self._all.refill(self._in_all, now)
            wait = max(wait, self._all.wait_seconds(self._in_all))
        return wait

    def take(self, key: Key, now: float, *, exempt: bool = False) -> bool:
        """Take a turn, if there is one; whether there was."""
        if self.wait_seconds(key, now, exempt=exempt) > 0.0:
            return False
        bucket = self._keys.pop(key, None) or _RateBucket(self._each.burst, now)
        bucket.left -= 1.0
        self._keys[key] = bucket
        if len(self._keys) > KEYS_LIMIT:
            del self._keys[next(iter(self._keys))]
        if not exempt:
            self._all.left -= 1.0
        return True

    def give_back(self, key: Key, *, exempt: bool = False) -> None:
        """The last turn of `key` does not count: it was no stranger's."""
        bucket = self._keys.get(key)
        if bucket is not None:
            bucket.left = min(self._each.burst, bucket.left + 1.0)
        if not exempt:
            self._all.left = min(self._in_all.burst, self._all.left + 1.0)
