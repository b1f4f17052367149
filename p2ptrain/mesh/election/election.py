"""Elects the coordinator among the members believed alive, in terms that only rise. Pure.

Source: Raft (Ongaro, Ousterhout, 2014), its leader election with pre-vote and leader stickiness.
Unlike Raft there is no fixed list of voters, because devices come and go: a majority is one of the
devices that the candidate believes alive. So both halves of a split network elect a coordinator.
Nothing is lost by that, since a generation is valid only where its holder is. When the halves
meet, terms.py decides which one remains. What always holds:

* a device votes once per term, and never for a term at or below its `term_floor`;
* the terms that a device follows never fall, except where its own is absurd (terms.py);
* no election while the coordinator lives: voters that follow a living coordinator refuse;
* only votes and announcements of the elected device raise terms. What others report is a hint for
  candidates. A group's claim counts for the followers of another coordinator only once a follower
  of the group has confirmed it, because a single member could invent one.

Nothing here ends a link: what this device does not believe is a `Misbehaved` event (conduct.py).
The shell feeds events and ticks with the time, carries out the instructions and calls at
`next_wakeup` at the latest. It stores `term` durably and gives it back as `term_floor`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from random import Random

from p2ptrain.errors import InternalError
from p2ptrain.mesh.conduct import Offence
from p2ptrain.mesh.election.terms import (
    ClaimVerdict,
    CoordinatorClaim,
    ElectionConfig,
    Terms,
    judge,
)
from p2ptrain.mesh.membership.core_events import (
    CoordinatorIs,
    CoordinatorLost,
    ElectionEvent,
    ElectionInstruction,
    MembersChanged,
    MessageReceived,
    Misbehaved,
    SendTo,
)
from p2ptrain.mesh.membership.core_messages import (
    SUPPORT_LIMIT,
    ElectionKind,
    ElectionMessage,
    decode,
    encode,
)

_NEVER = float("inf")


@dataclass(slots=True)
class _Campaign:
    """A poll (binds no device) or a vote under way; `yes` includes this device."""

    term: int
    poll: bool
    deadline: float
    yes: set[str] = field(default_factory=set)
    again: int = 0
    """How often it was begun once more because a voter knew a higher term."""


class Election:
    """One device's view of who coordinates.

    Args:
        self_id: this device.
        config: see ElectionConfig.
        rng: seeded by the caller; the only source of chance.
        term_floor: highest `term` this device ever had, from its disk.
    """

    def __init__(
        self, self_id: str, config: ElectionConfig, rng: Random, term_floor: int = 0
    ) -> None:
        self._self_id = self_id
        self._config = config
        self._rng = rng
        self._terms = Terms(term_floor, config)
        self._voted_for: str | None = None  # in the own term
        self._members: frozenset[str] = frozenset({self_id})  # the living
        self._excluded: dict[str, float] = {}  # device -> until when
        self._alive: frozenset[str] = frozenset({self_id})  # of the members, those that count here
        self._claim: CoordinatorClaim | None = None  # whom we follow; may be ourselves
        self._unplaced: CoordinatorClaim | None = None  # of a device not known to be alive yet
        self._supporters: dict[str, float] = {}  # follower -> time of its last answer
        self._answered: dict[str, float] = {}  # living peer -> when it got its last answer
        self._asked = float("-inf")  # when we last asked on hearsay
        self._claimed: dict[str, int] = {}  # peer -> the highest term it claimed unasked
        self._inquired = float("-inf")  # when we last asked who follows a rival
        self._followers: dict[str, tuple[str, float]] = {}  # peer -> whom it follows, said when
        self._raised_at = float("-inf")  # when we last had ourselves voted into a higher term
        self._campaign: _Campaign | None = None
        self._stand_at = _NEVER
        self._announce_at = _NEVER
        self._refresh_at = _NEVER
        self._now = float("-inf")
        self._out: list[ElectionInstruction] = []

    @property
    def coordinator(self) -> tuple[str, int] | None:
        """(id, term) of the coordinator followed, or None."""
        return None if self._claim is None else (self._claim.id, self._claim.term)

    @property
    def term(self) -> int:
        """Highest term voted or followed in: what a restart needs as `term_floor`."""
        return self._terms.own

    @property
    def next_wakeup(self) -> float:
        """When to call `tick` at the latest; infinity where nothing is due."""
        if self._now == float("-inf"):
            return self._now
        deadline = self._campaign.deadline if self._campaign else _NEVER
        back = min(self._excluded.values(), default=_NEVER)
        return min(self._stand_at, self._announce_at, self._refresh_at, deadline, back)

    def handle(self, event: ElectionEvent, now: float) -> list[ElectionInstruction]:
        """Take in one event.

        Raises:
            ProtocolError: the payload is not what the protocol allows; nothing was changed.
        """
        message = (
            decode(ElectionMessage, event.payload) if isinstance(event, MessageReceived) else None
        )
        self._begin(now)
        match event:
            case MembersChanged(alive):
                self._on_members(alive)
            case MessageReceived(peer) if message is not None:
                if peer not in self._excluded:
                    self._on_message(peer, message)
            case _:
                raise InternalError(f"election has no rule for {type(event).__name__}")
        return self._finish()

    def exclude(self, device: str, until: float, now: float) -> list[ElectionInstruction]:
        """Until then that device is neither followed nor voted for, nor counted, nor listened to.

        Nothing happens where it is this one. A second word about a device counts where it is later.
        """
        self._begin(now)
        if device != self._self_id:
            self._excluded[device] = max(until, self._excluded.get(device, until))
            self._count_in()
        return self._finish()

    def tick(self, now: float) -> list[ElectionInstruction]:
        """Do what is due."""
        self._begin(now)
        if min(self._excluded.values(), default=_NEVER) <= self._now:
            self._count_in()
        if self._campaign is not None and self._campaign.deadline <= self._now:
            self._campaign = None  # a coordinator tries again only if asked again
            if self._claim is None:
                self._stand_at = self._now
        if self._stand_at <= self._now:
            self._stand()
        if self._announce_at <= self._now:
            self._announce_some()
        if self._refresh_at <= self._now:
            self._ask_coordinator()
        return self._finish()

    def _begin(self, now: float) -> None:
        self._now = max(self._now, now)

    def _finish(self) -> list[ElectionInstruction]:
        if self._claim is None and self._campaign is None and self._stand_at == _NEVER:
            self._stand_soon()
        out, self._out = self._out, []
        return out

    # -- members ---------------------------------------------------------------------------

    def _on_members(self, members: frozenset[str]) -> None:
        self._members = members | {self._self_id}
        self._count_in()

    def _count_in(self) -> None:
        """All living members but those that are excluded now."""
        self._excluded = {d: until for d, until in self._excluded.items() if until > self._now}
        alive = self._members - self._excluded.keys()
        newcomers = sorted(alive - self._alive)
        self._alive = alive
        for peer in self._answered.keys() - alive:
            del self._answered[peer]
        for peer in self._followers.keys() - alive:
            del self._followers[peer]
        for peer in self._claimed.keys() - alive:
            del self._claimed[peer]
        self._terms.forget_others_than(alive)
        if self._claim is not None and self._claim.id not in alive:
            is_here = self._claim.id in self._members
            self._lose("the coordinator is passed over" if is_here else "the coordinator is gone")
        elif len(alive) == 1:
            self._stand_at = _NEVER  # no other device to wait for
        if self._coordinates:
            for peer in newcomers:
                self._announce_to(peer)
        if self._campaign is not None:
            self._count()
        unplaced = self._unplaced
        if unplaced is not None and unplaced.id in alive:
            self._unplaced = None
            self._on_claim(unplaced)

    def _lose(self, reason: str) -> None:
        self._claim = self._campaign = None
        self._supporters.clear()
        self._stand_at = self._announce_at = self._refresh_at = _NEVER
        self._out.append(CoordinatorLost(reason))

    # -- standing --------------------------------------------------------------------------

    def _stand_soon(self) -> None:
        """Stand after a random delay, at once where there is no other device to ask."""
        if len(self._alive) == 1:
            self._stand()
        else:
            self._stand_at = self._now + self._rng.uniform(*self._config.stand_delay_seconds)

    def _stand(self) -> None:
        """Ask for votes, by a poll first: terms do not rise by elections that cannot be won."""
        self._stand_at = _NEVER
        self._start_campaign(poll=True)

    def _start_campaign(self, *, poll: bool, term: int | None = None, again: int = 0) -> None:
        term = self._terms.next if term is None else max(term, self._terms.own + 1)
        deadline = self._now + self._rng.uniform(*self._config.campaign_seconds)
        self._campaign = _Campaign(term, poll, deadline, {self._self_id}, again)
        if not poll:
            self._terms.rise(term, self._now)
            self._voted_for = self._self_id
        kind = ElectionKind.POLL if poll else ElectionKind.VOTE
        self._send_all(ElectionMessage(kind, term))
        self._count()

    def _count(self) -> None:
        """Go from poll to vote, or from vote to office, where a majority said yes."""
        campaign = self._campaign
        if campaign is None or len(campaign.yes & self._alive) <= len(self._alive) // 2:
            return
        if campaign.poll:
            self._start_campaign(poll=False, term=campaign.term)
        else:
            self._win(campaign)

    def _win(self, campaign: _Campaign) -> None:
        voters = campaign.yes & self._alive
        self._campaign = None
        self._stand_at = self._refresh_at = _NEVER
        self._supporters = {v: self._now for v in sorted(voters) if v != self._self_id}
        self._claim = CoordinatorClaim(self._self_id, campaign.term, len(voters))
        reason = f"elected by {len(voters)} of {len(self._alive)} devices"
        self._out.append(CoordinatorIs(self._self_id, campaign.term, reason))
        for peer in self._others:
            self._announce_to(peer)
        self._announce_at = self._now + self._config.announce_interval_seconds

    # -- messages --------------------------------------------------------------------------

    def _on_message(self, peer: str, message: ElectionMessage) -> None:
        term = message.term
        own = _own_term(message)
        if own is not None and peer in self._alive:
            self._terms.hear(peer, own, self._now)
            self._heed_household()
        if self._terms.is_absurd(max(term, message.seen), self._now):
            self._ignore(peer)
            return
        match message.kind:
            case ElectionKind.POLL:
                self._on_poll(peer, term)
            case ElectionKind.VOTE:
                self._on_vote(peer, term)
            case ElectionKind.REPLY:
                self._on_reply(peer, message)
            case ElectionKind.ANNOUNCE:
                self._on_claim(CoordinatorClaim(peer, term, message.support))
            case ElectionKind.FOLLOW:
                self._on_follow(peer, term)
            case ElectionKind.STALE:
                self._on_stale(peer, term, message.leader)
            case ElectionKind.ASK:
                self._on_ask(peer)

    def _heed_household(self) -> None:
        """Come to the others' term where this device's own is absurd."""
        term = self._terms.household(self._others)
        if term is None:
            return
        self._terms.come_to(term)
        self._voted_for = self._campaign = None
        if self._claim is not None:
            self._lose(f"the others are in term {term}: this device's own was absurd")

    def _ignore(self, peer: str) -> None:
        """A term that cannot be. Its sender gets ours: it may be the one that must come to it."""
        self._out.append(Misbehaved(peer, Offence.ABSURD_TERM))
        if self._may_answer(peer):
            if self._coordinates:
                self._announce_to(peer)
            else:
                self._send_stale(peer)

    def _on_poll(self, peer: str, term: int) -> None:
        yes = term > self._terms.own and self._may_vote_for(peer)
        self._send_reply(peer, term, yes=yes, poll=True)

    def _on_vote(self, peer: str, term: int) -> None:
        again = term == self._terms.own and self._voted_for == peer
        yes = again or (term > self._terms.own and self._may_vote_for(peer))
        if yes:
            self._see(term)
            self._voted_for = peer
            if self._campaign is not None and self._campaign.term <= term:
                self._campaign = None
        self._send_reply(peer, term, yes=yes, poll=False)

    def _may_vote_for(self, peer: str) -> bool:
        """Only for the living, and never against a living coordinator."""
        free = self._claim is None or self._claim.id == peer
        return peer in self._alive and free

    def _send_reply(self, peer: str, term: int, *, yes: bool, poll: bool) -> None:
        reply = ElectionMessage(ElectionKind.REPLY, term, yes=yes, poll=poll, seen=self._terms.own)
        self._send(peer, reply)
        if self._coordinates:
            self._answer_by_announcing(peer)

    def _on_reply(self, peer: str, message: ElectionMessage) -> None:
        campaign = self._campaign
        if campaign is None or (message.term, message.poll) != (campaign.term, campaign.poll):
            return
        if message.yes:
            campaign.yes.add(peer)
            self._count()
        elif campaign.poll and campaign.term < self._terms.next:
            self._poll_again(campaign)

    def _poll_again(self, campaign: _Campaign) -> None:
        """In a higher term; a voter that always knows a higher one must not go on for ever."""
        if campaign.again < self._config.polls_again:
            self._start_campaign(poll=True, again=campaign.again + 1)

    def _on_follow(self, peer: str, term: int) -> None:
        if self._coordinates and self._claim is not None and term == self._claim.term:
            self._supporters[peer] = self._now

    def _on_stale(self, peer: str, term: int, leader: str) -> None:
        if peer in self._alive:
            self._followers[peer] = (leader, self._now)
        claim = self._claim
        if claim is None:
            return
        if self._coordinates:
            if term < claim.term:
                return  # of the same term: it gave way, and waits for a higher one
            self._supporters.pop(peer, None)
            if leader in ("", self._self_id):
                self._raise_term()
            else:
                self._ask(leader)
        elif peer == claim.id and leader != peer:
            self._lose("the device followed does not coordinate any more")
            self._ask(leader)

    def _on_ask(self, peer: str) -> None:
        if self._coordinates:
            self._answer_by_announcing(peer)
        else:
            self._send_stale(peer)

    # -- claims ----------------------------------------------------------------------------

    def _on_claim(self, theirs: CoordinatorClaim) -> None:
        if theirs.id not in self._alive:
            self._unplaced = theirs
            return
        self._look_at_term(theirs)
        ours = self._own_view()
        if ours is None:
            self._follow_or_refuse(theirs, "it announced itself")
        elif ours.id == theirs.id:
            self._on_same_coordinator(ours, theirs)
        else:
            self._on_rival(ours, self._believable(theirs))

    def _look_at_term(self, theirs: CoordinatorClaim) -> None:
        """Who is elected in term after term without this device's vote elects itself."""
        known = max(self._terms.own, self._claimed.get(theirs.id, 0))
        if theirs.term > known:  # had it voted, the term were its own
            self._claimed[theirs.id] = theirs.term
            self._out.append(Misbehaved(theirs.id, Offence.UNELECTED))

    def _believable(self, theirs: CoordinatorClaim) -> CoordinatorClaim:
        """The claim with followers only where one of them has said so; else the others are asked.

        This device follows another one: it did not vote for it.
        """
        since = self._now - self._config.witness_seconds
        said = (leader for leader, at in self._followers.values() if at >= since)
        if theirs.is_lone or theirs.id in said:
            return theirs
        fresh = self._fresh_supporters() if self._coordinates else set()
        others = sorted(set(self._others) - {theirs.id} - fresh)
        if others and self._now >= self._inquired + self._config.answer_seconds:
            self._inquired = self._now
            fanout = self._config.announce_fanout
            for peer in others if len(others) <= fanout else self._rng.sample(others, fanout):
                self._send(peer, ElectionMessage(ElectionKind.ASK))
        return dataclasses.replace(theirs, support=1)

    def _on_same_coordinator(self, ours: CoordinatorClaim, theirs: CoordinatorClaim) -> None:
        if theirs.term < ours.term:
            self._send_stale(theirs.id)
        elif theirs.term > ours.term:
            self._follow_or_refuse(theirs, "re-elected in a higher term")
        else:
            self._claim = theirs
            self._refresh_soon()
            self._send(theirs.id, ElectionMessage(ElectionKind.FOLLOW, theirs.term))

    def _on_rival(self, ours: CoordinatorClaim, theirs: CoordinatorClaim) -> None:
        verdict, reason = judge(ours, theirs)
        match verdict:
            case ClaimVerdict.FOLLOW if theirs.term >= self._terms.own:
                self._follow_or_refuse(theirs, reason)
            case ClaimVerdict.FOLLOW | ClaimVerdict.YIELD:
                self._lose(reason)
                self._send_stale(theirs.id)
            case ClaimVerdict.RAISE if self._coordinates:
                self._raise_term()
                self._answer_by_announcing(theirs.id)
            case ClaimVerdict.STAY if self._coordinates:
                self._answer_by_announcing(theirs.id)
            case _:
                self._send_stale(theirs.id)

    def _follow_or_refuse(self, theirs: CoordinatorClaim, reason: str) -> None:
        if theirs.term < self._terms.own:
            self._send_stale(theirs.id)
            return
        self._see(theirs.term)
        self._claim = theirs
        self._campaign = None
        self._supporters.clear()
        self._stand_at = self._announce_at = _NEVER
        self._refresh_soon()
        self._out.append(CoordinatorIs(theirs.id, theirs.term, reason))
        self._send(theirs.id, ElectionMessage(ElectionKind.FOLLOW, theirs.term))

    def _own_view(self) -> CoordinatorClaim | None:
        """The claim we hold to, with its support as far as we know it."""
        claim = self._claim
        if claim is None:
            return None
        support = self._support() if self._coordinates else max(2, claim.support)
        return dataclasses.replace(claim, support=support)

    def _support(self) -> int:
        return 1 + len(self._fresh_supporters())

    def _fresh_supporters(self) -> set[str]:
        horizon = self._now - self._config.support_seconds
        fresh = {p for p, heard in self._supporters.items() if heard >= horizon}
        return fresh & self._alive

    def _raise_term(self) -> None:
        """As coordinator, have ourselves voted into a term above all seen; not time and again."""
        if self._campaign is None and self._now >= self._raised_at + self._config.raise_seconds:
            self._raised_at = self._now
            self._start_campaign(poll=True)

    def _see(self, term: int) -> None:
        """Vote, or follow, in that term."""
        if term <= self._terms.own:
            return
        self._terms.rise(term, self._now)
        self._voted_for = None
        campaign = self._campaign
        if campaign is not None and not campaign.poll and campaign.term < term:
            self._campaign = None  # winning it would be worth nothing
            self._stand_at = self._now + self._rng.uniform(*self._config.stand_delay_seconds)

    # -- sending ---------------------------------------------------------------------------

    @property
    def _coordinates(self) -> bool:
        return self._claim is not None and self._claim.id == self._self_id

    @property
    def _others(self) -> list[str]:
        return sorted(self._alive - {self._self_id})

    def _announce_some(self) -> None:
        others, fanout = self._others, self._config.announce_fanout
        chosen = others if len(others) <= fanout else self._rng.sample(others, fanout)
        for peer in chosen:
            self._announce_to(peer)
        self._announce_at = self._now + self._config.announce_interval_seconds

    def _answer_by_announcing(self, peer: str) -> None:
        """Announce to `peer`, but not so often that two who disagree talk without end."""
        if self._may_answer(peer):
            self._announce_to(peer)

    def _may_answer(self, peer: str) -> bool:
        """Whether `peer` may have an answer now: this one counts."""
        if self._now < self._answered.get(peer, float("-inf")) + self._config.answer_seconds:
            return False
        self._answered[peer] = self._now
        return True

    def _announce_to(self, peer: str) -> None:
        claim = self._own_view()
        if claim is not None:
            support = min(claim.support, SUPPORT_LIMIT)
            self._send(peer, ElectionMessage(ElectionKind.ANNOUNCE, claim.term, support=support))

    def _ask(self, leader: str) -> None:
        """Ask whom another device follows, as rarely as `_answer_by_announcing` answers."""
        due = self._now >= self._asked + self._config.answer_seconds
        if leader in self._alive and due:
            self._asked = self._now
            self._send(leader, ElectionMessage(ElectionKind.ASK))

    def _ask_coordinator(self) -> None:
        if self._claim is not None and not self._coordinates:
            self._send(self._claim.id, ElectionMessage(ElectionKind.ASK))
        self._refresh_soon()

    def _refresh_soon(self) -> None:
        stretch = max(1.0, len(self._alive) / self._config.announce_fanout)
        self._refresh_at = self._now + self._config.refresh_seconds * stretch

    def _send_stale(self, peer: str) -> None:
        leader = "" if self._claim is None else self._claim.id
        self._send(peer, ElectionMessage(ElectionKind.STALE, self._terms.own, leader=leader))

    def _send_all(self, message: ElectionMessage) -> None:
        for peer in self._others:
            self._send(peer, message)

    def _send(self, peer: str, message: ElectionMessage) -> None:
        self._out.append(SendTo(peer, encode(message)))


def _own_term(message: ElectionMessage) -> int | None:
    """The sender's own term, where the message says it: a poll's binds no device."""
    match message.kind:
        case ElectionKind.REPLY:
            return message.seen
        case ElectionKind.VOTE | ElectionKind.ANNOUNCE | ElectionKind.STALE:
            return message.term
    return None
