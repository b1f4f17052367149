"""Pairing codes that no longer count here, because a removed device may know them.

A code stays in start scripts long after all devices are paired. So that it does not let in a device
that was removed meanwhile, this device remembers the codes it has accepted, and each removal spends
them. Only hashes are stored: the folder is private, but no one should read a code there.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.net.forms import Length
from p2ptrain.net.write_form import write_form

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
        self._folder.write_json(CODES_FILE, write_form(codes))
