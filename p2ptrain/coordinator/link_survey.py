"""Link speeds between the devices of a household, and the order in which they are measured.

Links are measured in pairs, as in a round-robin tournament (circle method): in each round every
device sends to one other and receives from one other, so that an interface carries one measurement
in each direction at a time. Ten devices take nine rounds of about 0.25 s. Larger households play
only the first rounds; links not measured are estimated from the best rates of their two ends.
A link clearly slower than its estimate is measured once more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from p2ptrain.plan.types.cluster import ClusterLink

Pair: TypeAlias = tuple[str, str]

MAX_ROUNDS = 9

FRESH_SECONDS = 600.0

DOUBTED = 0.85
"""Of what both ends are seen to do. A measurement takes 0.12 s, and a device that does something
else meanwhile seems to have a link of half the rate, which plans then avoid."""

ASSUMED = ClusterLink(bytes_per_s=5e6, latency_s=0.005)
"""Where neither end was ever measured: a slow Wi-Fi."""


def round_robin(devices: Sequence[str]) -> list[list[Pair]]:
    """Rounds of disjoint pairs in which each device meets each other once.

    Circle method: one seat is fixed, the others move one place a round.
    """
    seats: list[str | None] = [*sorted(devices)]
    if len(seats) % 2:
        seats.append(None)
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """One direction, and when (monotonic seconds) it was measured."""

    speed: ClusterLink
    at: float


class MeasuredLinks:
    """Speeds by (sender, receiver), with their age."""

    def __init__(self) -> None:
        self._measured: dict[Pair, LinkMeasurement] = {}

    def record(self, sender: str, receiver: str, speed: ClusterLink, now: float) -> None:
        """A new measurement replaces the old one."""
        self._measured[sender, receiver] = LinkMeasurement(speed, now)

    def note(self, sender: str, receiver: str, speed: ClusterLink, now: float) -> None:
        """What a device measured some time ago: news only where it is not what is known already."""
        known = self._measured.get((sender, receiver))
        if known is None or known.speed != speed:
            self.record(sender, receiver, speed, now)

    def knows(self, one: str, other: str) -> bool:
        """Whether both directions were measured, whenever that was."""
        return (one, other) in self._measured and (other, one) in self._measured

    def missing(self, devices: Sequence[str], now: float) -> list[list[Pair]]:
        """Rounds of the pairs that lack a fresh measurement in either direction."""
        rounds = []
        for pairs in round_robin(devices)[:MAX_ROUNDS]:
            stale = [p for p in pairs if not (self._fresh(p, now) and self._fresh(p[::-1], now))]
            if stale:
                rounds.append(stale)
        return rounds

    def doubtful(self, devices: Sequence[str]) -> list[list[Pair]]:
        """Rounds of the pairs that seem slower one way than both ends are otherwise."""
        rounds = [
            [pair for pair in pairs if self._is_doubtful(*pair) or self._is_doubtful(*pair[::-1])]
            for pairs in round_robin(devices)[:MAX_ROUNDS]
        ]
        return [pairs for pairs in rounds if pairs]

    def _is_doubtful(self, sender: str, receiver: str) -> bool:
        found, back = self._measured.get((sender, receiver)), self._measured.get((receiver, sender))
        if found is None:
            return False
        usual = self._ends(sender, receiver).bytes_per_s
        if back is not None:
            usual = max(usual, back.speed.bytes_per_s)
        return found.speed.bytes_per_s < DOUBTED * usual

    def record_again(self, sender: str, receiver: str, speed: ClusterLink, now: float) -> None:
        """A second measurement counts if it is the faster: whatever goes wrong makes one slower."""
        first = self._measured.get((sender, receiver))
        if first is None or speed.bytes_per_s > first.speed.bytes_per_s:
            self.record(sender, receiver, speed, now)

    def speeds(self, devices: Sequence[str]) -> Mapping[Pair, ClusterLink]:
        """Every direction between `devices`, estimated where it was not measured."""
        return {(a, b): self._speed(a, b) for a in devices for b in devices if a != b}

    def measured(self, devices: Collection[str]) -> Mapping[Pair, ClusterLink]:
        """Every direction between `devices` that was measured, whenever that was."""
        return {
            pair: found.speed
            for pair, found in self._measured.items()
            if pair[0] in devices and pair[1] in devices
        }

    def _fresh(self, pair: Pair, now: float) -> bool:
        found = self._measured.get(pair)
        return found is not None and now - found.at < FRESH_SECONDS

    def _speed(self, sender: str, receiver: str) -> ClusterLink:
        found = self._measured.get((sender, receiver))
        if found is not None:
            return found.speed
        return self._ends(sender, receiver)

    def _ends(self, sender: str, receiver: str) -> ClusterLink:
        """What the sender's best link and the receiver's best link are, the slower one."""
        ups = [m.speed for (a, _), m in self._measured.items() if a == sender]
        downs = [m.speed for (_, b), m in self._measured.items() if b == receiver]
        if not ups or not downs:
            return ASSUMED
        return ClusterLink(
            min(max(s.bytes_per_s for s in ups), max(s.bytes_per_s for s in downs)),
            max(min(s.latency_s for s in ups), min(s.latency_s for s in downs)),
        )
