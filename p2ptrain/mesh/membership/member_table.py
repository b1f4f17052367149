"""What a member believes of all members, which claims may change that, and which links it has.

Claims about one device are ordered by (incarnation, state): alive < suspect < dead < dead for
certain < left. Only the device itself raises its incarnation, so its own claim about itself always
wins in the end (SWIM, Das et al. 2002, section 4.2).

Poison is refused here: ids that are not trusted, and incarnations so high that their owner could
not outbid them. What a device says of itself over its own link is exempt from the second rule.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from types import MappingProxyType

from p2ptrain.mesh.interface import GONE, MemberState
from p2ptrain.mesh.membership.core_events import MemberRecord
from p2ptrain.mesh.membership.membership_config import MembershipConfig

_RANK = {
    MemberState.ALIVE: 0,
    MemberState.SUSPECT: 1,
    MemberState.DEAD: 2,
    MemberState.LEFT: 3,
}

LIVE = frozenset({MemberState.ALIVE, MemberState.SUSPECT})


def supersedes(claim: MemberRecord, known: MemberRecord) -> bool:
    """True where `claim` is later than what is known of the same device."""
    return _order(claim) > _order(known)


def _order(record: MemberRecord) -> tuple[int, int, bool]:
    return record.incarnation, _RANK[record.state], record.certain


class MemberTable:
    """Records by id, this device's own included; at most `table_limit` of them."""

    def __init__(self, self_record: MemberRecord, config: MembershipConfig) -> None:
        self._self_id = self_record.id
        self._config = config
        self._records: dict[str, MemberRecord] = {self_record.id: self_record}
        self._gone_since: dict[str, float] = {}  # exactly the ids in a state of GONE
        self._trusted: frozenset[str] | None = None
        self.refused_claims = 0

    @property
    def records(self) -> Mapping[str, MemberRecord]:
        """All records, read-only."""
        return MappingProxyType(self._records)

    @property
    def me(self) -> MemberRecord:
        """This device's own record."""
        return self._records[self._self_id]

    def live(self) -> list[str]:
        """Ids alive or suspect, this device's own included, in order of id."""
        return sorted(id_ for id_, record in self._records.items() if record.state in LIVE)

    def live_others(self) -> list[str]:
        """Ids alive or suspect other than this device's, in order of id."""
        return [device for device in self.live() if device != self._self_id]

    def dead(self) -> list[str]:
        """Ids dead (not left), in order of id."""
        gone = self._gone_since
        return sorted(i for i in gone if self._records[i].state is MemberState.DEAD)

    def trusts(self, device: str) -> bool:
        """True where `device` is paired with this one, or is this one (for claims about itself)."""
        return device == self._self_id or self._trusted is None or device in self._trusted

    def trust(self, trusted: frozenset[str] | None) -> list[MemberRecord]:
        """Trust exactly `trusted`; returns the records dropped for that."""
        self._trusted = trusted
        dropped = [
            record
            for id_, record in self._records.items()
            if id_ != self._self_id and not self.trusts(id_)
        ]
        for record in dropped:
            self._remove(record.id)
        return dropped

    def refusal(self, claim: MemberRecord, source: str) -> str | None:
        """Why a claim that came over the link of `source` must not be believed, or None.

        Counts refusals in `refused_claims`.
        """
        reason = self._refusal(claim, source)
        if reason is not None:
            self.refused_claims += 1
        return reason

    def _refusal(self, claim: MemberRecord, source: str) -> str | None:
        if not self.trusts(claim.id):
            return "this device is not paired with it"
        known = self._records.get(claim.id)
        if known is None and not self._has_room():
            return f"the table is full with {self._config.table_limit} members"
        if source != claim.id and claim.incarnation > self.believable_incarnation(claim.id):
            return "its incarnation leaps beyond what it could contradict"
        return None

    def believable_incarnation(self, device: str) -> int:
        """Highest incarnation of `device` that a third party may tell."""
        first = self._config.first_incarnation_limit
        known = self._records.get(device)
        if known is None:
            return first
        if device == self._self_id:
            return max(first, known.incarnation + self._config.incarnation_jump)
        return known.incarnation + self._config.incarnation_jump

    def put(self, record: MemberRecord, now: float) -> None:
        """Store `record`; the longest gone makes room where the table is full."""
        if record.id not in self._records and len(self._records) >= self._config.table_limit:
            self._remove(min(self._gone_since, key=lambda id_: (self._gone_since[id_], id_)))
        self._records[record.id] = record
        if record.state in GONE:
            self._gone_since.setdefault(record.id, now)
        else:
            self._gone_since.pop(record.id, None)

    def forget_old(self, now: float) -> None:
        """Forget who has been gone for `remember_seconds`."""
        if not self._gone_since:
            return
        horizon = now - self._config.remember_seconds
        for id_ in [i for i, since in self._gone_since.items() if since < horizon]:
            self._remove(id_)

    def digest(self) -> int:
        """64 bits that are equal where two tables list the same live processes."""
        value = 0
        for record in self._records.values():
            if record.state in LIVE:
                value ^= _fingerprint(record.id, record.incarnation, record.instance)
        return value

    def _has_room(self) -> bool:
        return bool(self._gone_since) or len(self._records) < self._config.table_limit

    def _remove(self, device: str) -> None:
        self._records.pop(device, None)
        self._gone_since.pop(device, None)


@functools.lru_cache(maxsize=4096)
def _fingerprint(device: str, incarnation: int, instance: str) -> int:
    text = f"{device}/{incarnation}/{instance}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


class LinkState:
    """A peer never linked is neither linked nor lost: messages to it may or may not arrive."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}  # linked peers -> time of their last message
        self._flowed: dict[str, float] = {}  # those of them that sent much -> when
        self._signs: dict[str, float] = {}  # those from whom anything came, if only a part -> when
        self._lost: set[str] = set()

    def up(self, peer: str, now: float) -> None:
        """The first link to `peer` is up."""
        self._lost.discard(peer)
        self._heard[peer] = now

    def lost(self, peer: str) -> None:
        """The last link to `peer` ended."""
        self._heard.pop(peer, None)
        self._flowed.pop(peer, None)
        self._signs.pop(peer, None)
        self._lost.add(peer)

    def heard(self, peer: str, now: float) -> None:
        """A message came over the link to `peer`."""
        if peer in self._heard:
            self._heard[peer] = self._signs[peer] = now

    def flowed(self, peer: str, at: float) -> None:
        """Much came over the link to `peer`, of whatever kind."""
        if peer in self._heard:
            self._flowed[peer] = at

    def gave_sign(self, peer: str, at: float) -> None:
        """Something came over the link to `peer`, and be it what cannot be read yet."""
        if peer in self._heard:
            self._signs[peer] = at

    def last_flow(self, peer: str) -> float:
        """When much came over an open link; -infinity where nothing like that did."""
        return self._flowed.get(peer, float("-inf"))

    def others_since(self, moment: float, but: str) -> bool:
        """Whether anything came since then over an open link to any other peer."""
        return any(at >= moment for peer, at in self._signs.items() if peer != but)

    def forget_loss(self, peer: str) -> None:
        """The loss is dealt with: `peer` is gone."""
        self._lost.discard(peer)

    def is_up(self, peer: str) -> bool:
        """True while there is a link."""
        return peer in self._heard

    def is_lost(self, peer: str) -> bool:
        """True from the loss of a link until it is back or the peer is gone."""
        return peer in self._lost

    def last_heard(self, peer: str) -> float:
        """When the last message came over an open link; -infinity where there is no link."""
        return self._heard.get(peer, float("-inf"))
