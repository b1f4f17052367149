"""The pairing window: a code, how long it counts, and how many wrong tries it allows.

Eight digits are 26.6 bit, and an online guess is the only attack that SPAKE2 leaves: with five
tries the chance is 5e-8. Failures only ever shorten the window; only the user at the device can
open it again.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from p2ptrain.errors import OptionError

WINDOW_SECONDS = 600.0

WRONG_TRIES_LIMIT = 5

CODE_DIGITS = 8


def new_code() -> str:
    """Eight random digits."""
    return f"{secrets.randbelow(10**CODE_DIGITS):0{CODE_DIGITS}d}"


def normalised_code(text: str) -> str:
    """The eight digits of a code as users write it: spaces and dashes do not count.

    Raises:
        OptionError: it is anything else.
    """
    digits = text.translate(str.maketrans("", "", " -\N{NO-BREAK SPACE}\N{EN DASH}\t"))
    if len(digits) != CODE_DIGITS or not (digits.isascii() and digits.isdigit()):
        raise OptionError(
            f"a pairing code is {CODE_DIGITS} digits, such as 1234-5678; give the one that the "
            "other device shows"
        )
    return digits


@dataclass(frozen=True, slots=True)
class PairingWindow:
    """One opening of the window; values, not a clock.

    Attributes:
        code: eight digits.
        closes_at: seconds on this device's monotonic clock.
        wrong_tries: so far.
        invited: opened by `p2ptrain invite`, so for removed devices too.
    """

    code: str
    closes_at: float
    wrong_tries: int = 0
    invited: bool = False

    @classmethod
    def opened(cls, code: str, now: float, *, invited: bool = False) -> PairingWindow:
        """A window that opens now."""
        return cls(code, now + WINDOW_SECONDS, invited=invited)

    @property
    def tries_left(self) -> int:
        """Wrong tries until the window closes."""
        return max(0, WRONG_TRIES_LIMIT - self.wrong_tries)

    def is_open(self, now: float) -> bool:
        """Whether a device may still pair."""
        return self.tries_left > 0 and now < self.closes_at

    def after_wrong_try(self) -> PairingWindow:
        """The same window, one try poorer; its end does not move."""
        return replace(self, wrong_tries=self.wrong_tries + 1)

    def why_closed(self, now: float) -> str:
        """For the user, where it is not open."""
        if self.tries_left == 0:
            return f"{WRONG_TRIES_LIMIT} wrong codes were tried"
        return f"{WINDOW_SECONDS / 60:.0f} minutes are over" if now >= self.closes_at else "open"
