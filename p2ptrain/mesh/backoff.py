"""How long to wait before the next try: exponential with jitter, so that devices that lost each
other at the same moment do not dial at the same moment again and again."""

from __future__ import annotations

from random import Random

FIRST_SECONDS = 0.2
MOST_SECONDS = 10.0


class Backoff:
    """The pauses between the tries to reach one device."""

    def __init__(
        self, rng: Random, first_seconds: float = FIRST_SECONDS, most_seconds: float = MOST_SECONDS
    ) -> None:
        self._rng = rng
        self._first_seconds = first_seconds
        self._most_seconds = most_seconds
        self._failures = 0

    def reset(self) -> None:
        """There is fresh reason to believe that the next try works."""
        self._failures = 0

    def next_seconds(self) -> float:
        """The pause after one more failure: half fixed, half random."""
        longest = min(self._first_seconds * 2.0**self._failures, self._most_seconds)
        self._failures = min(self._failures + 1, 32)
        return longest * self._rng.uniform(0.5, 1.0)
