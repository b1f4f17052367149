"""How fast a link takes what we write, measured from the writing itself.

While we have something to send, windows of WINDOW_SECONDS are measured. In a window where the
transport made us wait, bytes / time is the link's rate; in one where it did not, the rate is at
least that, so an estimate only rises. Idle time counts for nothing. Where all that is ever sent at
once is little for the link, the first estimate comes of several such times together.
"""

from __future__ import annotations

WINDOW_SECONDS = 0.1
SHORTEST_SECONDS = 0.02
"""A shorter window mostly measures the kernel's buffers."""
PROVING_BYTES = 8 * 128 * 1024
"""So much taken at once, without a wait, says that a link is fast however short the window was."""
NEWEST_WEIGHT = 0.5
HELD_BYTES = 128 * 1024
"""What was written may lie in the kernel still, so much of it."""
FALL = 4.0
"""A rate that is this many times lower is believed at once: too much is given away meanwhile."""


class LinkRateMeter:
    """Estimates a link's bytes/s.

    Attributes:
        bytes_per_s: None until the link has been the limit.
        at_least_bytes_per_s: what it took meanwhile without making us wait.
    """

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self.at_least_bytes_per_s = 0.0
        self._since: float | None = None
        self._bytes = 0
        self._waited = False
        self._short_bytes = 0  # of short times in which it was the limit
        self._short_seconds = 0.0

    def wrote(self, count: int, now: float) -> None:
        """`count` bytes went to the transport."""
        if self._since is None:
            self._since = now
        self._bytes += count
        if now - self._since >= WINDOW_SECONDS:
            self._close_window(now)
            self._since = now

    def waited(self) -> None:
        """The transport's buffers are full: the link is what limits us."""
        self._waited = True

    def idle(self, now: float) -> None:
        """Nothing is left to send."""
        since = self._since
        proves = self.bytes_per_s is None and not self._waited and self._bytes >= PROVING_BYTES
        if since is not None and (now - since >= SHORTEST_SECONDS or (proves and now > since)):
            self._close_window(now)
        elif since is not None and self.bytes_per_s is None and self._waited:
            self._add_short(now - since)
        self._since = None
        self._bytes = 0
        self._waited = False

    def _add_short(self, seconds: float) -> None:
        self._short_bytes += max(self._bytes - HELD_BYTES, 0)
        self._short_seconds += seconds
        if self._short_seconds >= SHORTEST_SECONDS and self._short_bytes:
            self.bytes_per_s = self._short_bytes / self._short_seconds

    def _close_window(self, now: float) -> None:
        assert self._since is not None
        rate = self._bytes / (now - self._since)
        old = self.bytes_per_s
        if self._waited:
            if old is None or rate * FALL < old:
                old = rate
            self.bytes_per_s = old + NEWEST_WEIGHT * (rate - old)
        elif old is not None:
            self.bytes_per_s = max(old, rate)
        else:
            left = (self._bytes - HELD_BYTES) / (now - self._since)
            self.at_least_bytes_per_s = max(self.at_least_bytes_per_s, left)
        self._bytes = 0
        self._waited = False
