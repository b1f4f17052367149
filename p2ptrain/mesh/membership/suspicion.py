"""A suspicion: the time in which a silent member can refute before it is declared dead.

Lifeguard's dynamic suspicion timeout (Dadgar et al. 2017, section 4.2). A suspicion that only one
device has waits long, because that device may be the slow one; each further device that finds
the same by its own probe shortens the wait, logarithmically, down to the least timeout:

    timeout = greatest - (greatest - least) * log(c + 1) / log(k + 1)

with c independent confirmations of the k expected.
"""

from __future__ import annotations

import math


def suspicion_timeout(
    confirmations: int, expected: int, least_seconds: float, greatest_seconds: float
) -> float:
    """Seconds from the start of a suspicion to the verdict.

    Args:
        confirmations: devices beyond the first that found the same.
        expected: confirmations after which nothing is gained by waiting; 0 where no other
            device could confirm, and then the least timeout holds.
        least_seconds: time enough for a frozen device to wake up and refute.
        greatest_seconds: timeout without any confirmation.
    """
    if confirmations >= expected:
        return least_seconds
    share = math.log(confirmations + 1) / math.log(expected + 1)
    return greatest_seconds - (greatest_seconds - least_seconds) * share


def group_factor(members: int) -> float:
    """What the least timeout is multiplied with: news takes a logarithmic time to get around."""
    return max(1.0, math.log10(members))


class Suspicion:
    """One running suspicion.

    Args:
        started: now.
        expected: confirmations after which nothing is gained by waiting.
        bounds: least and greatest timeout in seconds.

    Attributes:
        accusers: ids that found it silent by their own probe or link, in order of hearing;
            at most `ACCUSERS_LIMIT`, which is more than shorten the timeout.
        is_probed: whether this device asks for the suspect while it lasts; in large groups only
            some do.
        asked_at: when it last did so through others.
    """

    ACCUSERS_LIMIT = 4

    def __init__(self, started: float, expected: int, bounds: tuple[float, float]) -> None:
        self.accusers: tuple[str, ...] = ()
        self.is_probed = False
        self.asked_at = float("-inf")
        self._started = started
        self._expected = expected
        self._bounds = bounds
        self._not_before = started
        self._last_sign = float("-inf")
        self._lacked_witness = float("-inf")

    @property
    def deadline(self) -> float:
        """When the suspect is dead unless it refutes."""
        confirmations = max(0, len(self.accusers) - 1)
        timeout = suspicion_timeout(confirmations, self._expected, *self._bounds)
        return max(self._started + timeout, self._not_before)

    def seconds(self, now: float) -> float:
        """How long the suspicion has run, without the time this device was frozen."""
        return now - self._started

    def confirm(self, accusers: tuple[str, ...]) -> bool:
        """Add accusers; True where at least one was new."""
        room = self.ACCUSERS_LIMIT - len(self.accusers)
        new = tuple(a for a in accusers if a not in self.accusers)[:room]
        self.accusers += new
        return bool(new)

    def pause(self, frozen_seconds: float, not_before: float) -> None:
        """Do not count time in which this device itself was frozen and could not receive.

        Args:
            frozen_seconds: how long.
            not_before: no verdict before this time, so that what lies in the sockets, perhaps
                the refutation, is read first.
        """
        self._started += frozen_seconds
        self.wait_until(not_before)

    def excuse(self, sign_at: float, seconds: float, most_seconds: float) -> None:
        """The suspect gave a sign of life, though none that it receives from us.

        No verdict for `seconds` after it, but never later than `most_seconds` after the suspicion
        began.
        """
        self._last_sign = max(self._last_sign, sign_at)
        self.wait_until(min(sign_at + seconds, self._started + most_seconds))

    def has_sign_since(self, moment: float, most_seconds: float) -> bool:
        """Whether the suspect gave a sign since then, and since it is suspect, which is not long.

        Signs of before say nothing: a frozen device may have given them just before.
        """
        last = self._last_sign
        return last >= moment and self._started < last <= self._started + most_seconds

    def lack_witness(
        self, flowed_at: float, now: float, seconds: float, most_seconds: float
    ) -> None:
        """A member that may have the suspect's answers cannot report it: only data came from it.

        No verdict for `seconds` after it, within the bound of `excuse`. Data of before the
        suspicion says nothing: that member may be silent for the same reason.
        """
        if self._started < flowed_at and now < self._started + most_seconds:
            self._lacked_witness = now
            self.wait_until(min(flowed_at + seconds, self._started + most_seconds))

    def lacked_witness_since(self, moment: float) -> bool:
        """Whether a witness could not be reached then or later."""
        return self._lacked_witness >= moment

    def wait_until(self, not_before: float) -> None:
        """No verdict before this time."""
        self._not_before = max(self._not_before, not_before)
