"""A launch agent of macOS (launchd.plist(5)): it starts when its user logs in."""

from __future__ import annotations

import plistlib
import re
from collections.abc import Sequence
from pathlib import Path
from xml.parsers.expat import ExpatError

from p2ptrain.cli.service.definition import (
    LEAVE_SECONDS,
    RETRY_SECONDS,
    Account,
    AtBoot,
    ProgramAnswer,
    ProgramCall,
    Service,
    ServiceView,
    State,
    writable,
)


class Launchd:
    """The user's own domain, `gui/UID`."""

    tried = False
    starts = "when you log in"
    at_boot: AtBoot | None = None

    def __init__(self, name: str, account: Account) -> None:
        """For the service `name` of `account`."""
        self._name = name
        self._domain = f"gui/{account.uid}"
        self._target = f"{self._domain}/{name}"
        self.file = account.home / "Library" / "LaunchAgents" / f"{name}.plist"
        self._log = account.home / "Library" / "Logs" / f"{name}.log"
        self.others: tuple[Path, ...] = (self._log,)
        self.logs = f"tail -f '{self._log}'"

    def probe(self) -> ProgramCall:
        """Ask for the user's domain."""
        return ProgramCall(("launchctl", "print", self._domain))

    def refusal(self, answer: ProgramAnswer) -> str:
        """No launchd, or no user has logged in."""
        if answer.code is None:
            return "launchctl is missing, which every macOS has: start  p2ptrain join  yourself"
        return (
            f"launchd has no session for you ({answer.text or 'no answer'}): log in at the Mac's "
            "own screen, not only by ssh, and try again"
        )

    def content(self, service: Service, *, turned_on: bool) -> bytes:
        """The property list."""
        return plistlib.dumps(
            {
                "Label": self._name,
                "ProgramArguments": [*writable(service.words)],
                "RunAtLoad": True,
                "KeepAlive": {"SuccessfulExit": False},
                "ThrottleInterval": RETRY_SECONDS,
                "ExitTimeOut": LEAVE_SECONDS,
                "ProcessType": "Interactive",  # else macOS throttles what computes
                "Umask": 0o077,
                "StandardOutPath": str(self._log),
                "StandardErrorPath": str(self._log),
            }
        )

    def turned_on(self, content: bytes) -> bool:
        """There is nothing to turn on."""
        return False

    def program(self, content: bytes) -> str:
        """The first of its arguments."""
        try:
            return str(plistlib.loads(content)["ProgramArguments"][0])
        except (plistlib.InvalidFileException, ExpatError, ValueError, LookupError, TypeError):
            return ""  # it has been changed by hand

    def start(self) -> Sequence[ProgramCall]:
        """Load the agent, which starts it."""
        load = ProgramCall(("launchctl", "bootstrap", self._domain, str(self.file)))
        return *self.stop(), ProgramCall(("launchctl", "enable", self._target)), load

    def stop(self) -> Sequence[ProgramCall]:
        """SIGTERM, and unload it."""
        return (ProgramCall(("launchctl", "bootout", self._target), must=False),)

    def forget(self) -> Sequence[ProgramCall]:
        """Nothing is left."""
        return ()

    def look(self) -> Sequence[ProgramCall]:
        """The agent as launchd has it, and the end of its log."""
        last = ProgramCall(("tail", "-n", "1", str(self._log)), must=False)
        return ProgramCall(("launchctl", "print", self._target), must=False), last

    def seen(self, answers: Sequence[ProgramAnswer]) -> ServiceView:
        """From launchd's text for people: its first `state =` and `last exit code =`."""
        about, log = answers
        last = log.text.strip() if log.code == 0 else ""
        if about.code != 0:
            return ServiceView(State.MISSING)
        if re.search(r"^\s*state = running", about.text, re.M):
            return ServiceView(State.RUNNING, last_line=last)
        code = re.search(r"^\s*last exit code = (\d+)", about.text, re.M)
        if code is None or code[1] == "0":
            return ServiceView(State.STOPPED, last_line=last)
        why = f"exit code {code[1]}; it starts again every {RETRY_SECONDS} s"
        return ServiceView(State.FAILED, why, last)
