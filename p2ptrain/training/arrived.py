"""Which of a round's sums are there, told from the event loop to the compute thread."""

from __future__ import annotations

import threading
from collections.abc import Collection
from time import perf_counter


class GivenUp(Exception):  # nobody's error: the round has been given up
    """Nobody wants to know any more."""


class Arrived:
    """The sums of one round. Thread-safe.

    Attributes:
        waited_seconds: for how long `wait` has kept its callers.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._there: set[int] = set()
        self._is_given_up = False
        self.waited_seconds = 0.0

    def add(self, bucket: int) -> None:
        """That bucket's sum is in place."""
        with self._changed:
            self._there.add(bucket)
            self._changed.notify_all()

    def give_up(self) -> None:
        """Whoever waits now or later gets `GivenUp`, unless what it waits for is there."""
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()

    def wait(self, buckets: Collection[int]) -> frozenset[int]:
        """Wait until all of these are there; returns which are, these and others.

        Raises:
            GivenUp: they will not be.
        """
        began = perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._is_given_up or self._there.issuperset(buckets))
            self.waited_seconds += perf_counter() - began
            if not self._there.issuperset(buckets):
                raise GivenUp
            return frozenset(self._there)
