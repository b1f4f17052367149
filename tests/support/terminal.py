"""A command on a terminal of its own, and what a user sees on it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import pyte


class Terminal:
    """Runs `p2ptrain ARGUMENTS` on a terminal.

    Attributes:
        sent: all that the command has written.
        ended: its exit code.
    """

    def __init__(
        self, *arguments: str, columns: int = 80, environment: Mapping[str, str] | None = None
    ) -> None:
        self.sent = b""
        self.ended: int | None = None
        self._screen = pyte.HistoryScreen(columns, 24, history=1000)
        self._stream = pyte.ByteStream(self._screen)
        self._master, self._slave = pty.openpty()
        self._size(columns)
        self._modes = termios.tcgetattr(self._slave)
        self._more = asyncio.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "p2ptrain", *arguments],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "", **(environment or {})},
            preexec_fn=lambda: os.login_tty(self._slave),
        )

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._master, self._read)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._master)
        self._process.kill()
        self._process.wait()
        os.close(self._master)
        os.close(self._slave)

    def _read(self) -> None:
        data = os.read(self._master, 65536)
        self.sent += data
        self._stream.feed(data)
        self._more.set()

    def _size(self, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def resize(self, columns: int) -> None:
        """The user makes the window wider or narrower."""
        self._screen.resize(24, columns)
        self._size(columns)

    def lines(self) -> list[str]:
        """What is on the screen."""
        return [line.rstrip() for line in self._screen.display if line.strip()]

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    async def until(self, seen: str | Callable[[str], object]) -> list[str]:
        """Wait until the screen shows that; returns its lines."""
        while True:
            lines = self.lines()
            text = "\n".join(lines)
            if seen in text if isinstance(seen, str) else seen(text):
                return lines
            self._more.clear()
            await self._more.wait()

    async def end(self) -> int:
        """Wait until the command has ended; returns its exit code."""
        code = await asyncio.to_thread(self._process.wait)
        await asyncio.sleep(0)  # what it wrote last is read
        return code

    @property
    def is_as_before(self) -> bool:
        """The terminal is as the shell has left it: keys, cursor, screen."""
        shown = self.sent.rfind(b"\x1b[?25h") >= self.sent.rfind(b"\x1b[?25l")
        left = self.sent.count(b"\x1b[?1049h") == self.sent.count(b"\x1b[?1049l")
        return shown and left and termios.tcgetattr(self._slave) == self._modes
