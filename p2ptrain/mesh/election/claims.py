"""Which of two coordinators remains when two groups meet.

    group claim: at least one other device follows (support >= 2); lone claim: no device follows

    1. A group claim is preferred to a lone one, whatever the terms: a newcomer that elected itself
       while it was alone never disturbs a group.
    2. Otherwise the higher term is preferred, then the lower id.

Terms never fall, so a preferred claim of a lower term cannot simply be followed: its coordinator
first raises itself, by a vote, to a term above both. The same happens where two group claims have
equal terms, so that commands of the coordinator that gave way are older than those of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


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
    """What to do, and why. Both sides judge, and come to matching verdicts."""
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
