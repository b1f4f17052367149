"""What a float16 job multiplies its losses with: as `torch.amp.GradScaler` on one device does.

    update t finite everywhere ──► counts; every INTERVAL such in a row, the scale is doubled
    an infinity or NaN anywhere ─► skipped on all devices, and the scale is halved

The scale of a round follows from the updates before it. So what is kept is where it changed: it is
the same for every device, after a death, and for a process that resumes the job. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

FLOAT32_MAX = 3.4028234663852886e38

LEAST_SCALE = 1e-4
"""Gradients that are not finite at less than this are so by themselves: the job ends."""

MANY_SKIPPED = 10
"""Updates skipped in a row of which the user hears."""

CHANGES_LIMIT = 256

ScaleRows: TypeAlias = tuple[tuple[int, float], ...]
"""(updates behind it, the scale from there on), oldest first."""


@dataclass(frozen=True, slots=True)
class ScaleSettings:
    """Those of `torch.amp.GradScaler`, with its defaults."""

    first: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000


class LossScale:
    """Of one job.

    Args:
        step: updates that the job begins with.
        rows: what an earlier process noted.
    """

    def __init__(
        self, step: int = 0, rows: ScaleRows = (), settings: ScaleSettings = ScaleSettings()
    ) -> None:
        self._settings = settings
        self._rows: list[tuple[int, float]] = []
        self.begin(step, rows)

    def begin(self, step: int, rows: Iterable[tuple[int, float]]) -> None:
        """Resume with what was noted; the first scale where that says nothing of `step`."""
        self._rows = [*rows]
        if not self._rows or self._rows[0][0] > step:
            self._rows = [(step, self._settings.first)]

    @property
    def rows(self) -> ScaleRows:
        """All that is to be noted."""
        return tuple(self._rows)

    @property
    def skipped_in_a_row(self) -> int:
        """Updates just before the last change, itself included."""
        later = zip(self._rows, self._rows[1:], strict=False)
        count = last = 0
        for before, after in reversed([*later]):
            if after[1] >= before[1] or (count and after[0] != last - 1):
                break
            count, last = count + 1, after[0]
        return count

    def rows_at(self, step: int) -> ScaleRows:
        """What a checkpoint of that step needs."""
        return (self._at(step),)

    def of(self, step: int) -> float:
        """What the losses of the round after `step` updates are multiplied with."""
        return self._at(step)[1]

    def decided(self, step: int, *, skipped: bool) -> bool:
        """Update `step`, from 1, is decided; returns whether the scale is another one from there.

        It may have been decided before, and its round computed again since.
        """
        settings = self._settings
        since, scale = self._at(step - 1)
        before = self.rows
        self._rows = [row for row in self._rows if row[0] < step]
        if skipped:
            self._rows.append((step, scale * settings.backoff))
        elif step - since == settings.interval:
            grown = scale * settings.growth
            self._rows.append((step, grown if grown <= FLOAT32_MAX else scale))
        if len(self._rows) > CHANGES_LIMIT:  # the job may go back to its beginning, or a little
            del self._rows[1]
        return self.rows != before

    def _at(self, step: int) -> tuple[int, float]:
        """The scale after so many updates, and since when it is that."""
        return next(row for row in reversed(self._rows) if row[0] <= step)
