"""Each step and each evaluation is reported once, whatever is computed again."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.errors import InternalError


@dataclass(frozen=True, slots=True)
class Reported:
    """What people were told.

    Attributes:
        step: the highest step reported; -1 = none, not even the first weights.
        evaluated: the highest step whose evaluation was reported; -1 = none.
    """

    step: int
    evaluated: int = -1


class OnceOnly:
    """Says of each result whether it is news.

    Args:
        reported: what was reported so far; `step` is at first what the job began with.
    """

    def __init__(self, reported: Reported) -> None:
        self._reported = reported

    @property
    def reported(self) -> Reported:
        """What was reported so far."""
        return self._reported

    def step(self, step: int) -> bool:
        """Whether to report that `step` updates are done; the same number never again.

        Raises:
            InternalError: the step before was never reported.
        """
        if step > self._reported.step + 1:
            raise InternalError(f"step {step} is done, but {self._reported.step} was the last one")
        if step <= self._reported.step:
            return False
        self._reported = Reported(step, self._reported.evaluated)
        return True

    def goes_on_from(self, step: int) -> int:
        """Training goes on with `step` updates done; returns how many of them nobody knew of here.

        An update is made where people have heard of it, and a power cut may lose that they have:
        what was written down last reaches the disk within a second.
        """
        unknown = max(step - self._reported.step, 0)
        self._reported = Reported(self._reported.step + unknown, self._reported.evaluated)
        return unknown

    def eval(self, step: int) -> bool:
        """Whether to report the evaluation after `step` updates."""
        if step <= self._reported.evaluated:
            return False
        self._reported = Reported(self._reported.step, step)
        return True
