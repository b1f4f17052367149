"""Runs the user's command when a job ends or needs a person: `--notify`.

The event is JSON on the command's standard input, never a part of its words: no device's name and
no error's text is read by a shell, because there is none.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass

from p2ptrain.errors import OptionError, TrainingError
from p2ptrain.events import Event

NEEDS_A_PERSON = frozenset({"waiting", "paused", "done", "error", "stopped"})
"""Kinds of events."""


@dataclass(frozen=True, slots=True)
class NotifySettings:
    """Attributes:
    seconds: longest time that the command gets; then it is killed.
    """

    seconds: float = 20.0


class NotifySink:
    """One command, run once for each such event, one after the other."""

    name = "--notify"
    goes_on = True

    def __init__(self, command: str, settings: NotifySettings | None = None) -> None:
        """Raises OptionError: it is no command, or there is no such program."""
        self._settings = settings or NotifySettings()
        try:
            self._words = shlex.split(command, posix=os.name != "nt")
        except ValueError as error:
            raise OptionError(f"--notify {command!r}: {error}") from error
        if not self._words or shutil.which(self._words[0]) is None:
            raise OptionError(f"--notify {command!r}: there is no such program")

    def begin(self) -> None:
        """Nothing is run before the first event."""

    def take(self, event: Event) -> None:
        """Raises TrainingError: the command has failed."""
        if event.event not in NEEDS_A_PERSON:
            return
        text = json.dumps(event.to_json()) + "\n"
        try:
            done = subprocess.run(
                self._words,
                input=text,
                text=True,
                capture_output=True,
                timeout=self._settings.seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            why = f"it took longer than {self._settings.seconds:g} s"
        except OSError as error:
            why = error.strerror or str(error)
        else:
            if not done.returncode:
                return
            last = (done.stderr.strip().splitlines() or [""])[-1][:200]
            why = f"exit code {done.returncode}{': ' if last else ''}{last}"
        raise TrainingError(f"{self._words[0]}: {why}")

    def end(self) -> None:
        """Every command has ended."""
