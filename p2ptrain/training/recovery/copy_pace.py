"""How a keeper reads a copy: how much at once, and when. Pure: time is an argument.

offer ──► read ── pause ── read ── pause ── read        spread over a part of the time that
                                                        passes until the next offer
"""

from __future__ import annotations

from p2ptrain.training.recovery.cadence import REPLAY_LIMIT_SECONDS

PACED_SHARE = 0.6
"""Of the time between two offers: what dies meanwhile goes back to the version before. At once, a
copy of 125 MB makes the two or three rounds in which it travels half as long again; spread, its
reads find time in which the keeper waits. What comes from several devices at once shares the
keeper's interface, whatever their priorities. What is left shows how long rounds take without."""
PACED_LIMIT_SECONDS = PACED_SHARE * REPLAY_LIMIT_SECONDS
"""Most of it: after a long pause in training the next copy would take longer than it is awaited."""

READ_SECONDS = 0.1
"""Of link time in one read: what waits in the network's own queues holds up heartbeats too."""
LEAST_READ_BYTES = 128 << 10
"""Less takes about as long as a message does, whatever the link."""
READ_LIMIT_BYTES = 2 << 20
"""Larger: fewer requests, each of which costs as much as some 100 KiB. Smaller: a tensor for
training finds less before it at the reader, which takes milliseconds for it while it computes."""


class Pacing:
    """When reads are due, so that they spread evenly over a time."""

    def __init__(self, begun: float, seconds: float) -> None:
        self._begun = begun
        self._seconds = seconds
        self._total_bytes = 0

    def wait_seconds(self, left_bytes: int, now: float) -> float:
        """How long the next read waits, when `left_bytes` have to be read, its own included."""
        self._total_bytes = max(self._total_bytes, left_bytes)
        done = 1 - left_bytes / self._total_bytes if self._total_bytes else 1.0
        return max(self._begun + done * self._seconds - now, 0.0)


class ReadRates:
    """How fast reads have come from each owner of copies.

    Less than LEAST_READ_BYTES says only that the link is at least so fast.
    """

    def __init__(self) -> None:
        self._bytes_per_s: dict[str, float] = {}

    def read(self, owner: str, nbytes: int, seconds: float) -> None:
        """A read has ended."""
        rate = nbytes / max(seconds, 1e-6)
        if nbytes < LEAST_READ_BYTES:
            rate = max(rate, self._bytes_per_s.get(owner, 0.0))
        self._bytes_per_s[owner] = rate

    def next_read_bytes(self, owner: str) -> int:
        """How much to ask that owner for at once."""
        return read_bytes(self._bytes_per_s.get(owner, 0.0))


def paced_seconds(since_last: float) -> float:
    """How long to read a copy, offered so many seconds after the one before, or after the epoch's
    beginning."""
    return min(PACED_SHARE * since_last, PACED_LIMIT_SECONDS)


def read_bytes(bytes_per_s: float) -> int:
    """How much is read at once where reads come at that rate; 0 = that is not known."""
    return min(max(int(READ_SECONDS * bytes_per_s), LEAST_READ_BYTES), READ_LIMIT_BYTES)
