"""The pairing window: a code, how long it counts, and how many wrong tries it allows.

Eight digits are 26.6 bit, and an online guess is the only attack that SPAKE2 leaves: with five
tries the chance is 5e-8. Failures only ever shorten the window; only the user at the device can
open it again.

A code stays in start scripts long after all devices are paired. So that it does not let in a device
that was removed meanwhile, this device remembers the codes it has accepted, and each removal spends
them. Only hashes are stored: the folder is private, but no one should read a code there.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias

from p2ptrain.errors import OptionError
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.net.forms import Length

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


CODES_FILE = "codes.json"

MAX_CODES = 64
"""The newest of either kind."""

Marks: TypeAlias = Annotated[tuple[str, ...], Length(MAX_CODES)]


@dataclass(frozen=True, slots=True)
class _Codes:
    format: Literal["p2ptrain.codes/1"]
    taken: Marks
    spent: Marks


class KnownCodes:
    """The codes of one device.

    Every change counts at once, whether or not it can be written.
    """

    def __init__(self, folder: StateFolder, device_id: str) -> None:
        """Load what is there.

        Raises:
            BrokenFile: the file is damaged.
        """
        self._folder = folder
        self._device_id = device_id
        codes = folder.read_form(CODES_FILE, _Codes)
        self._taken, self._spent = (codes.taken, codes.spent) if codes is not None else ((), ())

    def take(self, code: str) -> None:
        """A window opens with this code.

        Raises:
            UserError: it cannot be written.
        """
        mark = self._mark(code)
        if mark not in self._taken:
            self._taken = (*self._taken, mark)[-MAX_CODES:]
            self._write()

    def spend(self) -> None:
        """A device was removed: whatever was taken so far it may know.

        Raises:
            UserError: it cannot be written.
        """
        if self._taken:
            self._spent = tuple(dict.fromkeys([*self._spent, *self._taken]))[-MAX_CODES:]
            self._taken = ()
            self._write()

    def is_spent(self, code: str) -> bool:
        """Whether it lets no device in any more."""
        return self._mark(code) in self._spent

    def _mark(self, code: str) -> str:
        return hashlib.sha256(f"p2ptrain code {self._device_id} {code}".encode()).hexdigest()

    def _write(self) -> None:
        codes = _Codes("p2ptrain.codes/1", self._taken, self._spent)
        self._folder.write_form(CODES_FILE, codes)
