"""Whether a device works on what it was asked for, by the signs that it gives. Pure.

    an answer to "how far are you?" ──► it is there; it works, or shows more than before
    none for a while ────────────────► it hangs, unless bytes still move on the link to it
    it is there, and idle ───────────► the request was lost in it

So a slow device has as long as it makes progress, and one that hangs costs seconds. Times are
seconds of any monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from p2ptrain.net.fields import FrameFields
from p2ptrain.net.forms import Bytes, Count

FLOW_BYTES_PER_S = 4096.0
"""Over a link on which more moves, a question may wait for what is before it."""


@dataclass(frozen=True, slots=True)
class WorkSign(FrameFields):
    """What a device says of its work.

    Attributes:
        tasks: that its compute thread has finished.
        fetched_bytes: what has come for the generation that is made ready.
        works: whether it does something for others now, or waits for others to do it.
    """

    tasks: Count
    fetched_bytes: Bytes
    works: bool = False


@dataclass(frozen=True, slots=True)
class SignLimits:
    """How long nothing may be seen.

    Attributes:
        look_seconds: between two questions.
        silent_seconds: without an answer to any. Membership, which finds out who has ended, uses
            the same event loop and less time.
        flowing_seconds: the same while bytes move on the link.
        still_seconds: while it answers that it does nothing.
        fruitless_seconds: while it says that it works, and nothing of it is seen.
    """

    look_seconds: float = 1.0
    silent_seconds: float = 6.0
    flowing_seconds: float = 30.0
    still_seconds: float = 8.0
    fruitless_seconds: float = 600.0


USUAL = SignLimits()

TALKS = SignLimits(still_seconds=inf, fruitless_seconds=inf)
"""For a device that only has to answer others."""

PLANS = SignLimits(silent_seconds=5.0, still_seconds=5.0, fruitless_seconds=inf)
"""For one that searches a plan: as long as it works; who waits for it can search too."""


class Signs:
    """Of one device, from `now` on."""

    def __init__(self, now: float, limits: SignLimits = USUAL) -> None:
        self._limits = limits
        self._last: WorkSign | None = None
        self._spoke = self._moved = self._worked = self._flowed = now
        self._link: tuple[float, int] | None = None

    def heard(self, sign: WorkSign, now: float) -> None:
        """It has answered."""
        last, self._last, self._spoke = self._last, sign, now
        if last is not None and (
            sign.tasks > last.tasks or sign.fetched_bytes > last.fetched_bytes
        ):
            self._moved = self._worked = now
        if sign.works:
            self._worked = now

    def link_has(self, moved_bytes: int, now: float) -> None:
        """So many bytes have moved on the link to it, both ways."""
        if self._link is not None:
            then, before = self._link
            if moved_bytes - before > FLOW_BYTES_PER_S * (now - then):
                self._flowed = now
        self._link = now, moved_bytes

    def why_not(self, now: float) -> str | None:
        """Why it is not waited for any more, in words that follow its name; None: it is."""
        limits = self._limits
        silent = now - self._spoke
        flows = now - self._flowed < limits.silent_seconds
        if silent >= (limits.flowing_seconds if flows else limits.silent_seconds):
            return f"has not answered for {silent:.0f} s"
        idle, fruitless = self._spoke - self._worked, self._spoke - self._moved
        if idle >= limits.still_seconds:
            return f"has done none of its work for {idle:.0f} s"
        if fruitless >= limits.fruitless_seconds:
            return f"says that it works, but has finished nothing for {fruitless:.0f} s"
        return None
