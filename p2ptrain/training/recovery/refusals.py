"""What a holder does when there is no way to another epoch. Pure.

it may see one soon            ask again, ever later where preparations are spoiled; not for ever
no plan fits without a leaver  that one stays
what is missing may come back  wait for it
else                           the job ends
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from p2ptrain.training.recovery.holder_instructions import StopJob
from p2ptrain.training.recovery.no_way import NoWay
from p2ptrain.training.recovery.presence import Presence

RETRY_SECONDS = 1.0
"""Between two requests where the first one failed and nothing has changed."""
MOST_DOUBLINGS = 3
"""Of that where a device is alive and does not answer: each request's epoch numbers are on the disk
first, and this may go on for hours."""
MOST_SPOILED = 5
"""Requests in a row without a new step in which every preparation was spoiled; the wait between two
doubles."""


@dataclass(frozen=True, slots=True)
class AskAgain:
    """After a while."""

    seconds: float


@dataclass(frozen=True, slots=True)
class KeepLeavers:
    """They stay, for this reason; ask again with them."""

    reason: str


@dataclass(frozen=True, slots=True)
class Await:
    """Nothing goes before one of these is back.

    Attributes:
        seconds: ask again after so long all the same; None = not before something happens.
    """

    devices: tuple[str, ...]
    seconds: float | None


Verdict: TypeAlias = AskAgain | KeepLeavers | Await | StopJob


class Refusals:
    """See the module.

    Attributes:
        lowered: memory in bytes that devices proved to have less of, by id.
    """

    def __init__(self) -> None:
        self.lowered: dict[str, int] = {}
        self._spoiled = 0  # requests in a row
        self._unseen = 0  # the same, while a device that is alive did not answer

    def progress(self) -> None:
        """A new step was made."""
        self._spoiled = self._unseen = 0

    def judge(self, refused: NoWay, there: Presence, *, someone_leaves: bool) -> Verdict:
        """What follows from one."""
        for device, memory_bytes in refused.lowered.items():
            self.lowered[device] = min(memory_bytes, self.lowered.get(device, memory_bytes))
        self._spoiled += refused.spoiled > 0
        if refused.again:
            return self._again(refused.reason)
        lost = refused.lost
        if lost is None and someone_leaves:
            return KeepLeavers(refused.reason)
        if lost.certain if lost is not None else not there.silent:
            return StopJob(refused.reason, lost)
        places = lost.last_places if lost is not None else there.silent
        seen = there.alive.intersection(places)  # but it did not answer, yet
        silent = there.silent.intersection(places)
        if not seen and not silent:  # they have ended for certain since that was found
            return AskAgain(RETRY_SECONDS)
        if not seen:
            return Await(tuple(sorted(silent)), None)
        seconds = RETRY_SECONDS * 2 ** min(self._unseen, MOST_DOUBLINGS)
        self._unseen += 1
        return Await(tuple(sorted(silent or seen)), seconds)

    def _again(self, reason: str) -> Verdict:
        if self._spoiled > MOST_SPOILED:
            return StopJob(f"{self._spoiled} times in a row a new plan could not start: {reason}")
        return AskAgain(RETRY_SECONDS * 2 ** max(self._spoiled - 1, 0))
