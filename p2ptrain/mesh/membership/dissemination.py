"""Spreads news of members: on probes, by gossip, and by comparing tables.

Source: SWIM's dissemination (Das et al. 2002, section 4.1): every message carries news as far as
it fits, newest first, until enough members have been informed. What no probe carries soon enough is
gossiped, at once to a few members and at an interval to the others. Tables are compared by digest
when a link comes up, at an interval with a random member, and with the dead, so that the two halves
of a split network find each other again.

Unlike SWIM's, links are reliable. So it counts *which* members a device has informed, not how
often: in a small group each member gets the news once from every other that has not received it
from that member; in a large one the limit grows with the logarithm of the group.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from random import Random

from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.membership.core_events import Instruction, MemberRecord, SendTo
from p2ptrain.mesh.membership.core_messages import (
    CLAIMS_LIMIT,
    ENVELOPE_BYTES,
    Claim,
    MembershipKind,
    MembershipMessage,
    claim_bytes,
    encode,
)
from p2ptrain.mesh.membership.member_table import LinkState, MemberTable
from p2ptrain.mesh.membership.membership_config import MembershipConfig
from p2ptrain.mesh.membership.suspicion import Suspicion


class Dissemination:
    """Everything a member sends goes through here; instructions collect in `out`."""

    def __init__(
        self,
        table: MemberTable,
        links: LinkState,
        suspicions: Mapping[str, Suspicion],
        config: MembershipConfig,
        rng: Random,
    ) -> None:
        self._table = table
        self._links = links
        self._suspicions = suspicions
        self._config = config
        self._rng = rng
        self._news = BroadcastQueue(config.gossip_limit_factor)
        self._eager = False  # the next gossip goes to eager_fanout members, without waiting
        self._next_gossip = self._next_sync = self._next_reconnect = 0.0
        self._corrected: dict[str, float] = {}  # peer -> time, within the last gossip interval
        self.out: list[Instruction] = []

    def schedule_first(self, now: float) -> None:
        """Start the timers."""
        self._next_gossip = now
        self._next_sync = now + self._rng.uniform(0, self._config.sync_interval_seconds)
        self._next_reconnect = now + self._config.reconnect_interval_seconds

    def next_due(self) -> float:
        """When `tick` or `gossip` next has something to do."""
        due = min(self._next_sync, self._next_reconnect)
        return min(due, self._next_gossip) if self._news else due

    def tick(self, now: float) -> None:
        """Compare tables where it is time to."""
        if self._corrected:
            self._corrected = {p: at for p, at in self._corrected.items() if not self._may(at, now)}
        if now >= self._next_sync:
            others = self.reachable()
            stretch = max(1.0, len(others) / 32)
            self._next_sync = now + self._config.sync_interval_seconds * stretch
            self._sync_with_some(others)
        if now >= self._next_reconnect:
            self._next_reconnect = now + self._config.reconnect_interval_seconds
            self._sync_with_some(self._table.dead())

    def reachable(self) -> list[str]:
        """Live members other than this device whose link is not lost, in order of id."""
        return [peer for peer in self._table.live_others() if not self._links.is_lost(peer)]

    def sample(self, peers: list[str], count: int) -> list[str]:
        """At most `count` of `peers`, chosen at random."""
        return list(peers) if len(peers) <= count else self._rng.sample(peers, count)

    def claim(self, record: MemberRecord) -> Claim:
        """`record` with the accusers known here."""
        suspicion = self._suspicions.get(record.id)
        if suspicion is None or record.state is not MemberState.SUSPECT:
            return Claim(record)
        return Claim(record, suspicion.accusers)

    def spread(
        self, record: MemberRecord, informed: Collection[str] = (), *, eager: bool = False
    ) -> None:
        """Pass `record` on, except to `informed`; `eager`: to many members at once."""
        self._news.put(self.claim(record), informed)
        self._eager = self._eager or eager

    def stop_spreading(self, device: str) -> None:
        """Pass on nothing more about `device`."""
        self._news.discard(device)

    def send(self, peer: str, message: MembershipMessage) -> None:
        """Send `message` with what `peer` must know of itself, and with news that fits."""
        claims = list(message.claims)
        view = self._table.records.get(peer)
        doubted = view is not None and view.state is not MemberState.ALIVE
        if view is not None and doubted and all(claim.record.id != peer for claim in claims):
            claims.append(self.claim(view))
        if self._news and not self._links.is_lost(peer):
            used = sum(claim_bytes(claim) for claim in claims)
            claims += self._news.take(peer, self._room_bytes - used)
        if len(claims) > len(message.claims):
            message = dataclasses.replace(message, claims=tuple(claims))
        self.out.append(SendTo(peer, encode(message)))

    def gossip(self, now: float) -> None:
        """Pass news on where it is time to."""
        if not self._news or (now < self._next_gossip and not self._eager):
            return
        peers = self.reachable()
        fanout = self._config.eager_fanout if self._eager else self._config.gossip_fanout
        for peer in self.sample(self._news.uninformed(peers), fanout):
            self.send(peer, MembershipMessage(MembershipKind.GOSSIP))
        self._news.prune(peers)
        self._eager = False
        self._next_gossip = now + self._config.gossip_interval_seconds

    def correct(self, peer: str, record: MemberRecord, now: float) -> None:
        """Tell `peer`, who was wrong about `record`, at most once per gossip interval.

        Else answers to what has been under way for long would beget answers. Nothing is lost by
        that: every message carries what is believed of its receiver, and tables are compared.
        """
        if self._may(self._corrected.get(peer, float("-inf")), now):
            self._corrected[peer] = now
            self.send(peer, MembershipMessage(MembershipKind.GOSSIP, (self.claim(record),)))

    def _may(self, last: float, now: float) -> bool:
        return now >= last + self._config.gossip_interval_seconds

    def sync_with(self, peer: str, *, answer: bool) -> None:
        """Tell `peer` who we are and what our table sums up to."""
        me = (Claim(self._table.me),)
        digest = self._table.digest()
        self.send(peer, MembershipMessage(MembershipKind.SYNC, me, digest=digest, answer=answer))

    def on_sync(self, peer: str, message: MembershipMessage) -> None:
        """Send our table where the digests differ, our digest where it was asked for."""
        if message.digest != self._table.digest():
            self._send_table(peer)
        if message.answer:
            self.sync_with(peer, answer=False)

    @property
    def _room_bytes(self) -> int:
        return self._config.message_limit_bytes - ENVELOPE_BYTES

    def _sync_with_some(self, peers: list[str]) -> None:
        for peer in self.sample(peers, 1):
            self.sync_with(peer, answer=True)

    def _send_table(self, peer: str) -> None:
        page: list[Claim] = []
        used = 0
        for record in self._table.records.values():
            claim = self.claim(record)
            size = claim_bytes(claim)
            if page and (used + size > self._room_bytes or len(page) == CLAIMS_LIMIT // 2):
                self._send_page(peer, page)
                page, used = [], 0
            page.append(claim)
            used += size
        self._send_page(peer, page)

    def _send_page(self, peer: str, page: list[Claim]) -> None:
        self.out.append(SendTo(peer, encode(MembershipMessage(MembershipKind.GOSSIP, tuple(page)))))


@dataclass(slots=True)
class _News:
    claim: Claim
    size_bytes: int
    informed: set[str] = field(default_factory=set)


class BroadcastQueue:
    """At most one piece of news per member: newer replaces older."""

    def __init__(self, limit_factor: int) -> None:
        self._limit_factor = limit_factor
        self._news: dict[str, _News] = {}

    def __len__(self) -> int:
        return len(self._news)

    def put(self, claim: Claim, informed: Collection[str] = ()) -> None:
        """Spread `claim`, except to those already `informed` (and to its subject, which
        gets it directly)."""
        subject = claim.record.id
        self._news.pop(subject, None)
        self._news[subject] = _News(claim, claim_bytes(claim), {*informed, subject})

    def discard(self, subject: str) -> None:
        """Spread nothing more about `subject`."""
        self._news.pop(subject, None)

    def uninformed(self, peers: Collection[str]) -> list[str]:
        """Those of `peers` whom at least one piece of news has not reached, in their order."""
        return [p for p in peers if any(p not in news.informed for news in self._news.values())]

    def take(self, peer: str, room_bytes: int) -> tuple[Claim, ...]:
        """News for `peer`, newest first, at most `room_bytes` of it; counted as sent."""
        taken: list[Claim] = []
        for news in reversed(self._news.values()):
            if (
                peer in news.informed
                or news.size_bytes > room_bytes
                or len(taken) == CLAIMS_LIMIT // 2
            ):
                continue
            news.informed.add(peer)
            room_bytes -= news.size_bytes
            taken.append(news.claim)
        return tuple(taken)

    def prune(self, peers: Collection[str]) -> None:
        """Drop news sent to enough members: to all `peers`, or to the limit."""
        limit = self._limit_factor * math.ceil(math.log2(len(peers) + 2))
        for subject, news in list(self._news.items()):
            if len(news.informed) > limit or all(peer in news.informed for peer in peers):
                del self._news[subject]
