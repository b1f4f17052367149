"""What a service of any system is made of: what starts, whose it is, and what is seen of it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from p2ptrain.errors import UserError

LEAVE_SECONDS = 90
"""How long the system waits for the end of `join`, which hands its work over first: 30 s at most,
and 30 s more where the others cannot take it."""

RETRY_SECONDS = 10
"""How long after a crash `join` starts again."""

DESCRIPTION = "p2ptrain: this device computes for the household"


@dataclass(frozen=True, slots=True)
class Account:
    """Whose service it is.

    Attributes:
        name: as the system knows the user; with the domain on Windows.
        config: where the user's programs keep their settings (systemd).
        logs: folder of the user's log files (Windows).
    """

    name: str
    uid: int
    home: Path
    config: Path
    logs: Path


@dataclass(frozen=True, slots=True)
class Service:
    """What is started.

    Attributes:
        program: the Python that runs it, by its whole path.
        options: what follows `join`, the state folder among them, no pairing code.
    """

    program: str
    options: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The command; -P, since a folder `p2ptrain` where it starts is not the package."""
        return (self.program, "-P", "-m", "p2ptrain", "join", *self.options)


class State(StrEnum):
    """What a service is doing."""

    RUNNING = "running"
    FAILED = "failed"
    STOPPED = "stopped"
    MISSING = "not installed"


@dataclass(frozen=True, slots=True)
class ServiceView:
    """What the system says of a service.

    Attributes:
        why: of a failed one, in the system's words.
        last_line: the newest of its log.
    """

    state: State
    why: str = ""
    last_line: str = ""


@dataclass(frozen=True, slots=True)
class ProgramAnswer:
    """What a program of the system has answered.

    Attributes:
        code: its exit code; None where there is no such program, or no end.
    """

    code: int | None
    text: str = ""


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """A program of the system to run; where `must` is false, a failure changes nothing."""

    words: tuple[str, ...]
    must: bool = True


@dataclass(frozen=True, slots=True)
class AtBoot:
    """What lets a user's services start before the user logs in.

    Attributes:
        ask: succeeds where that is so, with `is_on` in its output.
        on, off: turn it on and off, for this user.
        by_hand: what to type where that needs a password.
    """

    ask: ProgramCall
    is_on: str
    on: ProgramCall
    off: ProgramCall
    by_hand: str


class ServiceManager(ABC):
    """Pure: what a system's manager of services reads, and what is to be asked of it.

    Attributes:
        tried: it has been run for real, not only checked by its rules.
        starts: when the service starts.
        file: the service's definition; `others` are files that it leaves.
        logs: what to type to see the log.
        at_boot: None where services of users only start when they log in.
    """

    tried = False
    starts = "when you log in"
    file: Path
    others: tuple[Path, ...] = ()
    logs: str
    at_boot: AtBoot | None = None

    @abstractmethod
    def probe(self) -> ProgramCall:
        """Succeeds where services of this user can be managed."""

    @abstractmethod
    def refusal(self, answer: ProgramAnswer) -> str:
        """Why they cannot, and what to do."""

    @abstractmethod
    def content(self, service: Service, *, turned_on: bool) -> bytes:
        """The file; `turned_on` notes that `at_boot` was turned on for it."""

    def turned_on(self, content: bytes) -> bool:
        """Whether that was noted; nothing is turned on where there is no `at_boot`."""
        return False

    @abstractmethod
    def program(self, content: bytes) -> str:
        """The Python that the file starts; "" where it does not say."""

    @abstractmethod
    def start(self) -> Sequence[ProgramCall]:
        """Let the service run, now and from now on; one that runs starts again."""

    @abstractmethod
    def stop(self) -> Sequence[ProgramCall]:
        """End it for good, gracefully where the system can."""

    def forget(self) -> Sequence[ProgramCall]:
        """After its file is gone."""
        return ()

    @abstractmethod
    def look(self) -> Sequence[ProgramCall]:
        """What `seen` reads."""

    @abstractmethod
    def seen(self, answers: Sequence[ProgramAnswer]) -> ServiceView:
        """What the answers to `look` mean."""


def service_name(folder: Path, usual: Path) -> str:
    """One name for each state folder: a machine may have several members."""
    if folder == usual:
        return "p2ptrain"
    return f"p2ptrain-{hashlib.sha256(str(folder).encode(errors='replace')).hexdigest()[:8]}"


def writable(words: Sequence[str]) -> Sequence[str]:
    """The words, if a definition can hold them.

    Raises:
        UserError: a path or name has characters that it cannot.
    """
    for word in words:
        if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in word):
            raise UserError(
                f"a service cannot be started with {word!r}: it has characters that definitions of "
                "services cannot hold; choose another name or folder"
            )
    return words
