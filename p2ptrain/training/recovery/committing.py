"""When an update counts: once every seat has its gradients complete, and not before.

    seats      gradients of round t complete ── done ──►┐
    holder                                              all in: step t + 1 is decided
    seats      the update  ◄── commit ──────────────────┘

A seat that has applied t is the proof that all others were ready for it. So nobody is ever more
than one version behind another, and who is behind can catch up without computing anything.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

from p2ptrain.errors import ProtocolError

Seat: TypeAlias = tuple[int, str]
"""A stage and one of its devices."""


class Committing:
    """Counts the seats that are ready, step by step.

    Args:
        seats: all that take part in every update.
        start: updates applied to the state that the epoch begins with.
    """

    def __init__(self, seats: Collection[Seat], start: int) -> None:
        self._seats = frozenset(seats)
        self._ready: set[Seat] = set()
        self._decided = start

    @property
    def decided(self) -> int:
        """Updates that count."""
        return self._decided

    @property
    def missing(self) -> frozenset[Seat]:
        """Seats that the next update waits for."""
        return self._seats - self._ready

    def done(self, seat: Seat, step: int) -> bool:
        """A seat's gradients of the round that turns version `step` into the next are complete.

        Returns whether that was the last one: the update is decided, and counts.

        Raises:
            ProtocolError: no such seat, not this step, or said before.
        """
        if seat not in self._seats or step != self._decided or seat in self._ready:
            raise ProtocolError(f"stage {seat[0]} is ready for step {step} twice or unasked")
        self._ready.add(seat)
        if self.missing:
            return False
        self._ready.clear()
        self._decided += 1
        return True
