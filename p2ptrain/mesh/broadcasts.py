"""Which news still has to be passed on, and to whom.

SWIM's dissemination (Das et al. 2002, section 4.1): news rides on the probes and on gossip
messages, newest first, until enough members were told. Links are reliable here, so what counts is
*whom* a device told, not how often: in a small group every member is told once by everyone who has
not heard the news from it, in a large one the limit grows with the logarithm of the group.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from p2ptrain.mesh.membership_wire import CLAIMS_LIMIT, Claim, claim_bytes


@dataclass(slots=True)
class _News:
    claim: Claim
    size_bytes: int
    told: set[str] = field(default_factory=set)


class BroadcastQueue:
    """At most one piece of news per member: newer replaces older."""

    def __init__(self, limit_factor: int) -> None:
        self._limit_factor = limit_factor
        self._news: dict[str, _News] = {}

    def __len__(self) -> int:
        return len(self._news)

    def put(self, claim: Claim, told: Collection[str] = ()) -> None:
        """Spread `claim`, except to those already `told` (and to its subject, told directly)."""
        subject = claim.record.id
        self._news.pop(subject, None)
        self._news[subject] = _News(claim, claim_bytes(claim), {*told, subject})

    def discard(self, subject: str) -> None:
        """Spread nothing more about `subject`."""
        self._news.pop(subject, None)

    def untold(self, peers: Collection[str]) -> list[str]:
        """Those of `peers` whom at least one piece of news has not reached, in their order."""
        return [p for p in peers if any(p not in news.told for news in self._news.values())]

    def take(self, peer: str, room_bytes: int) -> tuple[Claim, ...]:
        """News for `peer`, newest first, at most `room_bytes` of it; counted as told."""
        taken: list[Claim] = []
        for news in reversed(self._news.values()):
            if peer in news.told or news.size_bytes > room_bytes or len(taken) == CLAIMS_LIMIT // 2:
                continue
            news.told.add(peer)
            room_bytes -= news.size_bytes
            taken.append(news.claim)
        return tuple(taken)

    def prune(self, peers: Collection[str]) -> None:
        """Drop news told to enough members: to all `peers`, or to the limit."""
        limit = self._limit_factor * math.ceil(math.log2(len(peers) + 2))
        for subject, news in list(self._news.items()):
            if len(news.told) > limit or all(peer in news.told for peer in peers):
                del self._news[subject]
