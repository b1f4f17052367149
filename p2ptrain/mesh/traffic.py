"""Which peers send much at the moment, from what has come over their links so far.

Where a link is full, a probe or its answer may wait behind data for longer than a probe has time.
The data says then that its sender is there. A few bytes say nothing: the kernel of a device that
hears nobody still sends what fits into its window.
"""

from __future__ import annotations

from collections.abc import Mapping

FLOW_BYTES = 4096
"""So much more than before is traffic. Probes and their answers alone take seconds for it."""


class TrafficWatch:
    """Pure: shown the counters now and then, it says whose have grown."""

    def __init__(self) -> None:
        self._counted: dict[str, int] = {}  # peer -> its bytes when it was last said to have sent
        self._looked = float("-inf")

    def look(self, received_bytes: Mapping[str, int], now: float) -> dict[str, float]:
        """Who has sent FLOW_BYTES more: peer -> a time not later than that of the last of them.

        Args:
            received_bytes: over each open link, since it is open.
            now: seconds of a monotonic clock.
        """
        came: dict[str, float] = {}
        counted: dict[str, int] = {}
        for peer, count in received_bytes.items():
            before = self._counted.get(peer)
            if before is None or count < before:  # another link
                counted[peer] = count
            elif count - before >= FLOW_BYTES:
                counted[peer] = count
                came[peer] = self._looked
            else:
                counted[peer] = before
        self._counted, self._looked = counted, now
        return came
