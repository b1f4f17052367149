"""Does with a service what its manager says: runs programs, writes and removes files."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.cli.service.definition import (
    LEAVE_SECONDS,
    AtBoot,
    ProgramAnswer,
    ProgramCall,
    Service,
    ServiceManager,
    ServiceView,
    State,
)
from p2ptrain.errors import UserError
from p2ptrain.files import write_whole

Runner = Callable[[Sequence[str]], ProgramAnswer]

_NO_END = 124

_WITH_DEVICE = "with this device"


@dataclass(frozen=True, slots=True)
class Report:
    """What a service is now, and what the user should know.

    Attributes:
        changed: this command has changed it.
        starts: when it starts by itself.
    """

    view: ServiceView
    starts: str
    changed: bool = False
    notes: tuple[str, ...] = ()


class ServiceShell:
    """Installs, shows and removes one service."""

    def __init__(self, manager: ServiceManager, run: Runner) -> None:
        """With `run` to start programs."""
        self._manager = manager
        self._run = run

    def check(self) -> None:
        """Raises UserError: this system cannot keep the user's services; it says why."""
        answer = self._run(self._manager.probe().words)
        if answer.code != 0:
            raise UserError(self._manager.refusal(answer))

    def install(self, service: Service) -> Report:
        """Let `service` run from now on; where it does so already nothing happens.

        Raises:
            UserError: the system refuses, or a file cannot be written.
        """
        self.check()
        manager, old = self._manager, self._content()
        turned_on, starts, notes = self._turn_on(manager.at_boot, old)
        new = manager.content(service, turned_on=turned_on)
        if old == new and (view := self._seen()).state is State.RUNNING:
            return Report(view, starts, notes=notes)
        self._write(new)
        self._do(manager.start())
        return Report(self._seen(), starts, changed=True, notes=notes)

    def status(self) -> Report:
        """How it is. Raises UserError: as `check`."""
        self.check()
        content, view = self._content(), self._seen()
        program = "" if content is None else self._manager.program(content)
        if program and not Path(program).exists():
            gone = (
                f"{program} is gone, which runs it: install p2ptrain again and run  p2ptrain "
                "service install , or run  p2ptrain service uninstall"
            )
            failed = ServiceView(State.FAILED, "its Python is gone", view.last_line)
            return Report(failed, "", notes=(gone,))
        boot = self._manager.at_boot
        starts = _WITH_DEVICE if boot is not None and self._is_on(boot) else self._manager.starts
        return Report(view, starts)

    def uninstall(self) -> Report:
        """Stop it and remove all that `install` has made. Raises UserError: as `install`."""
        self.check()
        manager, content = self._manager, self._content()
        there = content is not None or self._seen().state is not State.MISSING
        if there:
            self._do(manager.stop())
            for file in (manager.file, *manager.others):
                file.unlink(missing_ok=True)
            self._do(manager.forget())
        boot = manager.at_boot
        if boot is not None and content is not None and manager.turned_on(content):
            others = [*manager.file.parent.glob(f"p2ptrain*{manager.file.suffix}")]
            self._do([] if others else [boot.off])
        with contextlib.suppress(OSError):  # others' files are in there
            for folder in (*manager.file.parents,)[:2]:
                folder.rmdir()
        return Report(ServiceView(State.MISSING), "", changed=there)

    def _turn_on(self, boot: AtBoot | None, old: bytes | None) -> tuple[bool, str, tuple[str, ...]]:
        """Have services start with the device; (whether we did that, when they start, notes)."""
        if boot is None:
            return False, self._manager.starts, ()
        if self._is_on(boot):
            return old is not None and self._manager.turned_on(old), _WITH_DEVICE, ()
        answer = self._run(boot.on.words)
        if answer.code == 0:
            return True, _WITH_DEVICE, ()
        said = f" ({answer.text})" if answer.text else ""
        note = (
            f"it starts only when you log in: to start it with this device, which needs an "
            f"administrator here{said}, run  {boot.by_hand}"
        )
        return False, self._manager.starts, (note,)

    def _is_on(self, boot: AtBoot) -> bool:
        answer = self._run(boot.ask.words)
        return answer.code == 0 and boot.is_on in answer.text.split()

    def _seen(self) -> ServiceView:
        return self._manager.seen([self._run(step.words) for step in self._manager.look()])

    def _do(self, steps: Sequence[ProgramCall]) -> None:
        for step in steps:
            answer = self._run(step.words)
            if step.must and answer.code != 0:
                said = answer.text or "it says no reason"
                raise UserError(f"`{' '.join(step.words)}` has failed: {said}")

    def _content(self) -> bytes | None:
        try:
            return self._manager.file.read_bytes()
        except FileNotFoundError:
            return None

    def _write(self, content: bytes) -> None:
        file = self._manager.file
        file.parent.mkdir(parents=True, exist_ok=True)
        for other in self._manager.others:
            other.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, [content])


def run_program(words: Sequence[str]) -> ProgramAnswer:
    """Run a program of the system, which answers in English where it can."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LEAVE_SECONDS + 30,
            env=environment,
            check=False,
        )
    except (FileNotFoundError, PermissionError):
        return ProgramAnswer(None)
    except subprocess.TimeoutExpired:
        return ProgramAnswer(_NO_END, f"no answer within {LEAVE_SECONDS + 30} s")
    text = done.stdout if done.returncode == 0 else (done.stderr or done.stdout)
    return ProgramAnswer(done.returncode, text.strip())
