"""How well this device itself is doing: Lifeguard's local health (Dadgar et al. 2017, section 4).

A device that was frozen, or that hears from nobody, should doubt itself before it accuses others.
Two kinds of evidence raise the score: its own tick came late (the process was frozen, so every
timer that ran out meanwhile proves nothing), and helpers that should have answered a probe request
at once did not. A probe that succeeds lowers it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LocalHealth:
    """The awareness score; 0 is healthy.

    Attributes:
        score_limit: highest score, so probes stretch to at most `score_limit + 1` times.
        late_tick_seconds: a tick later than this means the process was frozen.
        score: 0 to `score_limit`; changed by the methods below only.
    """

    score_limit: int
    late_tick_seconds: float
    score: int = 0

    @property
    def multiplier(self) -> int:
        """What probe intervals and probe timeouts are multiplied with."""
        return self.score + 1

    def frozen_seconds(self, due: float, now: float) -> float:
        """How long this process was frozen, given a tick due at `due`; 0 where it was not.

        Raises the score by one where it was.
        """
        late = now - due
        if late <= self.late_tick_seconds:
            return 0.0
        self.penalise(1)
        return late

    def penalise(self, points: int) -> None:
        """Count `points` pieces of evidence that this device is the slow one."""
        self.score = min(self.score_limit, self.score + points)

    def reward(self) -> None:
        """Count one probe answered in time."""
        self.score = max(0, self.score - 1)
