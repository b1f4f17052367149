"""How many bytes of gradients a group sums together, and what its ring takes for them: pure.

Each bucket costs every device of a group of g 4(g-1) messages, however small, and each message
wakes a processor. Links wait for the first bucket, and updates for the last one, for as long as it
takes to send. So what is small depends on the links.

    bytes in buckets      before        1  2        4        4       2  1
    made by a backward    ------------>|==|====|========|========|====|==|
    links stand still until here ------^             rounds wait for this -^

Around a ring of g devices they go in 2(g-1) steps, each with a g-th part of the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_BYTES = 1 << 20
"""Of the first and the last bucket, on links of any rate: 80 ms at 100 Mbit/s."""

MIN_SECONDS = 0.08
"""On faster links as much as they carry in this time."""

MAX_BYTES = 4 << 20
"""Larger costs memory and saves little more."""

TURNED_PART = 8
"""The first bucket that the next round's forward waits for is smaller by so much: 10 ms."""


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """Of one stage.

    Attributes:
        least_bytes: of its first and its last bucket.
    """

    least_bytes: int = MIN_BYTES

    @classmethod
    def at(cls, bytes_per_s: float) -> BucketSizes:
        """For a ring whose slowest link has that rate, which may be infinite."""
        carried = min(MIN_SECONDS * bytes_per_s, MAX_BYTES)
        return cls(max(MIN_BYTES, int(carried)))

    def next_bytes(self, before_bytes: int, left_bytes: int) -> int:
        """The next one's: half of what is left, no more than there was before, within bounds."""
        wanted = min(before_bytes, left_bytes // 2)
        return min(max(wanted, self.least_bytes), MAX_BYTES)

    def turned_bytes(self, before_bytes: int, left_bytes: int = 0) -> int:
        """The same of what a forward waits for from its first units on.

        As much as before it: the forward then has about as much to do as the wire.
        """
        return min(max(before_bytes, self.least_bytes // TURNED_PART), MAX_BYTES)


USUAL = BucketSizes()
"""On links of up to 100 Mbit/s."""


def ring_steps(devices: int) -> int:
    """Messages that each of so many devices sends, one after the other."""
    return 2 * (devices - 1)


def ring_bytes(devices: int, summed_bytes: float) -> float:
    """What each of them sends, and receives, where so many bytes are summed."""
    return ring_steps(devices) / devices * summed_bytes


def ring_seconds(
    devices: int, summed_bytes: float, bytes_per_s: float, latency_s: float = 0.0
) -> float:
    """Until every device has the sum; the slowest link and the longest latency count."""
    return ring_bytes(devices, summed_bytes) / bytes_per_s + ring_steps(devices) * latency_s
