"""The term of one device: how fast it may rise, and how a device with an absurd term comes back.

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

from p2ptrain.mesh.election.election_config import ElectionConfig


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
