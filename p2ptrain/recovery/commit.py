"""When an update counts: once every stage member has its gradients complete, and not before.

    members    gradients of round t complete ── done ──►┐
    holder                                              all in: step t + 1 is decided
    members    the update  ◄── commit ──────────────────┘

A member that has applied t proves that all others were ready for it. So no member is ever more
than one version behind another, and one that is behind catches up without computing. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, TypeAlias

from p2ptrain.errors import ProtocolError
from p2ptrain.net.forms import By, Range

Seat: TypeAlias = tuple[int, str]
"""A stage and one of its devices."""


class CommitTracker:
    """Counts the stage members that have finished a round. Several rounds may be under way.

    Rounds of an evaluation are counted too: nothing is applied after them. Who is done with one may
    arrive before the last report of the round before it, as reports come over different links.

    Args:
        seats: all that take part in every round.
        start: number of the first round.
    """

    def __init__(self, seats: Collection[Seat], start: int = 0) -> None:
        self._seats = frozenset(seats)
        self._missing: dict[int, set[Seat]] = {}  # by round, of those under way
        self._over = start

    @property
    def over(self) -> int:
        """The first round that is not over, of those ordered and those to come."""
        return min(self._missing, default=self._over)

    @property
    def missing(self) -> frozenset[Seat]:
        """Stage members that have not finished the oldest round under way; none where there is
        none."""
        oldest = min(self._missing, default=None)
        return frozenset() if oldest is None else frozenset(self._missing[oldest])

    def order(self, number: int) -> None:
        """A round begins."""
        self._missing.setdefault(number, set(self._seats))
        self._over = max(self._over, number + 1)

    def done(self, seat: Seat, number: int) -> bool:
        """A stage member has finished a round; in training, its gradients are complete.

        Returns whether it was the last one: the round is over, and its update counts.

        Raises:
            ProtocolError: no such stage member, no such round under way, or said before.
        """
        missing = self._missing.get(number, set())
        if seat not in missing:
            raise ProtocolError(f"stage {seat[0]} reported round {number} twice or unasked")
        missing.discard(seat)
        if missing:
            return False
        del self._missing[number]
        return True


LEFT_OUT = (0.0, "left out")
"""Coefficient of an update that counts and changes nothing."""

SKIPPED = (0.0, "skipped")
"""Of one whose scaled gradients are not finite: what its forwards have written stays."""

AS_IT_IS = (1.0, "as it is")
"""Of one that is made of the gradients as they are, where some are left out."""


_WORDS = (LEFT_OUT[1], SKIPPED[1], AS_IT_IS[1])


def _floating(value: object) -> str:
    known = ("float16", "bfloat16", "float32", "float64", *_WORDS)
    if not isinstance(value, str) or value not in known:
        raise ValueError("gradients are clipped by a floating-point number")
    return value


Coefficient: TypeAlias = tuple[
    Annotated[float, Range(-math.inf, math.inf, finite=False)], Annotated[str, By(_floating, str)]
]
"""What gradients are multiplied with so that their norm is clipped, and the name of its dtype.

Of a job that leaves out updates that are not finite also: LEFT_OUT, SKIPPED or AS_IT_IS.
"""
