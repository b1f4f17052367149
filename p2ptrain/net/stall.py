"""When a peer that owes us the rest of a message is given up.

A peer that declares a large body and then sends nothing, or a byte a second, would hold memory for
as long as it likes. So while any message is unfinished, every `seconds` must bring at least
`least_bytes`, of whatever lane: a bulk message may wait long behind urgent ones.
"""

from __future__ import annotations


class StallWatch:
    """Pure: asked now and then, it says whether the peer has stalled."""

    def __init__(self, seconds: float, least_bytes: int) -> None:
        self._seconds = seconds
        self._least_bytes = least_bytes
        self._since: float | None = None
        self._bytes_then = 0

    def stalled(self, partial: bool, received_bytes: int, now: float) -> bool:
        """Whether too little came for too long.

        Args:
            partial: whether a message has begun and not ended.
            received_bytes: total received on the link so far.
            now: seconds of a monotonic clock.
        """
        if not partial:
            self._since = None
            return False
        if self._since is None or received_bytes - self._bytes_then >= self._least_bytes:
            self._since = now
            self._bytes_then = received_bytes
            return False
        return now - self._since >= self._seconds
