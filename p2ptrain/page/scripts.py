"""Trainings that a browser may start: scripts that this device's person has named to `join`.

A browser says which of them, and nothing else: no path, no option and no code of its own. One runs
at a time, as `p2ptrain train SCRIPT`, whose words go into a file of the state folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from p2ptrain.aio.tasks import TaskOwner, end_program
from p2ptrain.errors import UserError
from p2ptrain.logs import get_logger
from p2ptrain.page.state import NoteView

log = get_logger(__name__)

OUTPUT_FILE = "started_from_page.log"

STOP_SECONDS = 30.0
"""For a training to let its devices go."""

_TAIL_BYTES = 2000


class AllowedScripts:
    """A context, for as long as `join` runs: what was started ends with it.

    Attributes:
        notes: what has come of those that were started, the newest last.
    """

    def __init__(
        self,
        folder: Path,
        scripts: Sequence[Path],
        program: Sequence[str] = (sys.executable, "-m", "p2ptrain"),
    ) -> None:
        """`folder`: the state folder."""
        self.notes: deque[NoteView] = deque(maxlen=10)
        self._folder = folder
        self._scripts = {str(script): script for script in scripts}
        self._program = program
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._tasks = TaskOwner(_failed)

    @property
    def names(self) -> tuple[str, ...]:
        """Their paths."""
        return tuple(self._scripts)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Interrupt the one that runs, as Ctrl-C does."""
        process = self._process
        if process is not None and process.returncode is None:
            await end_program(process, STOP_SECONDS)
        await self.ended()

    async def ended(self) -> None:
        """Wait until the one that runs has ended, and that is noted."""
        if self._watching is not None:
            await asyncio.wait([self._watching])

    async def start(self, name: str) -> None:
        """Start one. Raises UserError: it is not allowed, is gone, or another one runs."""
        script = self._scripts.get(name)
        if script is None:
            raise UserError("this device's person has not allowed that script")
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                raise UserError("the training that was started here still runs")
            if not script.is_file():
                raise UserError(f"{script} is not there any more")
            arguments = ("train", str(script), "--state-dir", str(self._folder))
            try:
                with (self._folder / OUTPUT_FILE).open("wb") as output:
                    self._process = await asyncio.create_subprocess_exec(
                        *(*self._program, *arguments),
                        stdin=asyncio.subprocess.DEVNULL,
                        stdout=output,
                        stderr=asyncio.subprocess.STDOUT,
                        cwd=script.parent,
                        start_new_session=True,  # Ctrl-C at `join` is for it first
                    )
            except OSError as error:
                raise UserError(f"{script} cannot be started: {error}") from error
        self._note("started", f"{script.name} was started from the page.")
        watch = self._watch(script, self._process)
        self._watching = self._tasks.spawn(watch, "watch a script")

    async def _watch(self, script: Path, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        log.info("script_ended", script=str(script), code=code)
        if code not in (0, 130):
            said = await asyncio.to_thread(self._last_line)
            where = self._folder / OUTPUT_FILE
            self._note("error", f"{script.name} failed: {said or f'exit code {code}'} ({where})")

    def _last_line(self) -> str:
        with contextlib.suppress(OSError):
            text = (self._folder / OUTPUT_FILE).read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return lines[-1][:300] if lines else ""
        return ""

    def _note(self, kind: str, text: str) -> None:
        self.notes.append(NoteView(round(time.time()), kind, text))


def _failed(name: str, error: BaseException) -> None:
    log.warning("script_not_watched", task=name, why=str(error) or type(error).__name__)
