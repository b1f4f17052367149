"""The rules of an election: its knobs, which of two claims wins, and how a device's term moves.

A term rises by votes and by announcements of the device elected in it; any other report of a term
is a hint for candidates only. The sum of all rises is bounded by time (`term_jump` at once,
`term_rise_per_second` after that), so that no member can drive a household's terms to their end.
Elections are far rarer. A term further above than that is invented, or was read from a damaged
folder, and is ignored.

A device whose own term is absurd receives terms far below its own, or far above:

* where more than half of the others are further below than `term_jump`, it comes down to them;
* where more than half of all devices are further above, it comes up to them.

Of two devices the higher one comes down; of two halves the higher half does. Two never pass each
other, since both rules count the same devices. A device that comes down might vote twice in a term
between the two, but no other device is there, because all of them are below.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class ElectionConfig:
    """Knobs of one device; all devices of a group should use the same.

    Attributes:
        stand_delay_seconds: a device without coordinator stands after a random time between these
            two. Raise the spread: fewer split votes. Lower: a new coordinator sooner.
        campaign_seconds: a poll or vote without majority is given up after a random time between
            these two. Must exceed the way there and back. Raise: slower after a split vote. Lower:
            slow links never finish a vote.
        announce_interval_seconds: the coordinator repeats itself this often. Raise: latecomers wait
            longer. Lower: traffic.
        announce_fanout: at most this many get it per interval, in random choice; newcomers and
            the whole group after an election get it at once. Raise: bursts in large groups.
            Lower: repairs take longer.
        answer_seconds: a peer's message is answered by an announcement at most this often. Raise:
            repairs take longer. Lower: two who disagree exchange more messages.
        support_seconds: a follower that has not answered for this long no longer counts as
            support. Raise: a coordinator thawed after a freeze overrates itself. Lower: a busy
            group looks like a lone device to a newcomer.
        refresh_seconds: a follower that has received nothing from it for this long asks,
            times max(1, members / announce_fanout). Raise: a coordinator that quietly stopped
            being one is noticed later. Lower: traffic.
        raise_seconds: a coordinator has itself voted into a higher term this often at most. Raise:
            two groups that meet agree later. Lower: a member that lies keeps it busy.
        polls_again: a poll is begun again at once, in a higher term, so often. Raise and lower:
            as above, the other way around.
        witness_seconds: what a member says of whom it follows counts for so long. Raise: news of
            a rival is believed that is none any more. Lower: slow links never bring it in time.
        term_jump: the own term rises by at most this at once. What is further above is ignored;
            whose own term is further from those of the others takes theirs. Raise: terms can be
            driven further. Lower: a device long away takes the household's term by that rule.
        term_rise_per_second: so much of `term_jump` comes back. Must exceed the elections per
            second that can be. Raise: terms can be driven faster.
    """

    stand_delay_seconds: tuple[float, float] = (0.05, 0.3)
    campaign_seconds: tuple[float, float] = (0.3, 0.6)
    announce_interval_seconds: float = 0.5
    announce_fanout: int = 16
    answer_seconds: float = 0.05
    support_seconds: float = 1.6
    refresh_seconds: float = 2.0
    raise_seconds: float = 1.0
    polls_again: int = 3
    witness_seconds: float = 3.0
    term_jump: int = 4096
    term_rise_per_second: float = 16.0


@dataclass(frozen=True, slots=True)
class CoordinatorClaim:
    """`id` coordinates in `term`; `support` devices, itself included, follow it."""

    id: str
    term: int
    support: int

    @property
    def is_lone(self) -> bool:
        """True where no other device follows."""
        return self.support < 2


class ClaimVerdict(Enum):
    """What a device that holds to one claim does on receiving another."""

    FOLLOW = auto()
    """Give up ours, follow theirs."""
    STAY = auto()
    """Keep ours; they will follow."""
    RAISE = auto()
    """Keep ours, which must first be voted into a higher term."""
    YIELD = auto()
    """Give up ours; theirs will come back with a higher term."""


def judge(ours: CoordinatorClaim, theirs: CoordinatorClaim) -> tuple[ClaimVerdict, str]:
    """What to do, and why. Both sides judge, and come to matching verdicts.

    1. A group claim (support >= 2) is preferred to a lone one, whatever the terms: a newcomer that
       elected itself while it was alone never disturbs a group.
    2. Otherwise the higher term is preferred, then the lower id.

    Terms never fall, so a preferred claim of a lower term cannot simply be followed: its
    coordinator first raises itself, by a vote, to a term above both. The same happens where two
    group claims have equal terms, so that commands of the coordinator that gave way are older than
    those of the other.
    """
    they_win, reason = _preferred(ours, theirs)
    fenced = not (ours.term == theirs.term and not ours.is_lone and not theirs.is_lone)
    if they_win:
        can_follow = theirs.term >= ours.term and fenced
        return (ClaimVerdict.FOLLOW if can_follow else ClaimVerdict.YIELD), reason
    can_stay = ours.term >= theirs.term and fenced
    return (ClaimVerdict.STAY if can_stay else ClaimVerdict.RAISE), reason


def _preferred(ours: CoordinatorClaim, theirs: CoordinatorClaim) -> tuple[bool, str]:
    if ours.is_lone != theirs.is_lone:
        return ours.is_lone, "a group's coordinator stays when a lone device joins"
    if ours.term != theirs.term:
        return theirs.term > ours.term, "two groups met: the higher term stays"
    return theirs.id < ours.id, "two groups met in one term: the lower id stays"


class Terms:
    """The highest term that this device voted or followed in, and the terms that others report.

    Attributes:
        own: that term.
        hint: highest term that others gave as theirs and that can be; 0 where it is lower.
    """

    def __init__(self, floor: int, config: ElectionConfig) -> None:
        self.own = floor
        self.hint = 0
        self._config = config
        self._room = float(config.term_jump)
        self._filled_at: float | None = None
        self._reported: dict[str, int] = {}  # peer -> its own term, as it said last

    @property
    def next(self) -> int:
        """The term for a candidate to stand in: above all that those must give up who vote."""
        return max(self.own, self.hint) + 1

    def is_absurd(self, term: int, now: float) -> bool:
        """Whether no election can have reached that term by now."""
        self._refill(now)
        return term > self.own + self._room

    def rise(self, term: int, now: float) -> None:
        """This device votes, or follows, in a term above its own."""
        self._refill(now)
        self._room = max(0.0, self._room - (term - self.own))
        self._move(term)

    def hear(self, peer: str, term: int, now: float) -> None:
        """`peer` gave `term` as its own: a hint for candidates where it can be, no more."""
        self._reported[peer] = term
        if not self.is_absurd(term, now):
            self.hint = max(self.hint, term)

    def forget_others_than(self, alive: Collection[str]) -> None:
        """Only those count that are there."""
        for peer in self._reported.keys() - set(alive):
            del self._reported[peer]

    def household(self, others: Collection[str]) -> int | None:
        """The term that this device must come to because its own is absurd; None: it is not."""
        reported = sorted(self._reported[peer] for peer in others if peer in self._reported)
        jump = self._config.term_jump
        below_needed, above_needed = len(others) // 2 + 1, (len(others) + 1) // 2 + 1
        if len(reported) >= below_needed and reported[below_needed - 1] + jump < self.own:
            return reported[below_needed - 1]
        if len(reported) >= above_needed and reported[-above_needed] > self.own + jump:
            return reported[-above_needed]
        return None

    def come_to(self, term: int) -> None:
        """Take the household's term for one's own."""
        self.hint = 0
        self._move(term)

    def _move(self, term: int) -> None:
        self.own = term
        if self.hint <= term:
            self.hint = 0

    def _refill(self, now: float) -> None:
        if self._filled_at is not None:
            passed = max(0.0, now - self._filled_at)
            refilled = self._room + passed * self._config.term_rise_per_second
            self._room = min(float(self._config.term_jump), refilled)
        self._filled_at = now
