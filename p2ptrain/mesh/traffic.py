"""Which peers send at the moment, from what has come over their links so far.

Where a link is full, a probe or its answer may wait behind data for longer than a probe has time.
The data says then that its sender is there. A few bytes say less: the kernel of a device that
hears nobody still sends what fits into its window.
"""

from __future__ import annotations

from collections.abc import Mapping

from p2ptrain.mesh.events import LinkTraffic
from p2ptrain.net.stream import Arrival

FLOW_BYTES = 4096
"""So much more than before is traffic. Probes and their answers alone take seconds for it."""


class TrafficWatch:
    """Pure: shown the counters now and then, it says whose have grown."""

    def __init__(self) -> None:
        self._counted: dict[str, int] = {}  # peer -> its bytes when it was last said to have sent
        self._seen: dict[str, Arrival] = {}  # at the last look
        self._looked = float("-inf")

    def look(self, arrivals: Mapping[str, Arrival], now: float) -> LinkTraffic | None:
        """Whose counters have grown since the last look, and by FLOW_BYTES; None: nobody's.

        All is dated to the last look, so no later than it came.

        Args:
            arrivals: over each open link, since it is open.
            now: seconds of a monotonic clock.
        """
        came: dict[str, float] = {}
        signs: dict[str, float] = {}
        counted: dict[str, int] = {}
        for peer, arrival in arrivals.items():
            count = arrival.received_bytes
            before = self._counted.get(peer)
            last = self._seen.get(peer)
            if before is None or last is None or count < before:  # another link
                counted[peer] = count
                continue
            if count - before >= FLOW_BYTES:
                counted[peer] = count
                came[peer] = self._looked
            else:
                counted[peer] = before
            if arrival != last:
                signs[peer] = self._looked
        self._counted, self._seen, self._looked = counted, dict(arrivals), now
        return LinkTraffic(came, signs) if signs else None
