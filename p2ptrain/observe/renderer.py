"""What shows events: to a program (JSON lines), to a log file (plain lines), to a person (console).

Commands know only `Renderer`; which one stands behind it is decided once, in `cli.output`.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Protocol, TextIO

from p2ptrain.observe.events import Event


class Renderer(Protocol):
    """Shows events in the order they are given."""

    def show(self, event: Event) -> None:
        """Show one event at once. Never raises: a reader that went away is reported elsewhere."""

    def close(self) -> None:
        """End the display, leaving what was shown on the screen. Harmless when repeated."""


class LineWriter:
    """Writes whole lines, flushed.

    Names come from other devices: what the stream's encoding lacks is written as in "\\u53f0".
    A reader that goes away (`p2ptrain ... | head`) is no error of the command's: `on_closed` is
    called once, and what is written afterwards is dropped.

    Attributes:
        closed: the reader is gone.
        on_closed: what to do when that is noticed; set by the command.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper):  # here: a display of progress writes to it too
            stream.reconfigure(errors="backslashreplace")
        self.closed = False
        self.on_closed: Callable[[], None] | None = None

    def write(self, line: str) -> None:
        """Write `line` and the end of line."""
        if self.closed:
            return
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except BrokenPipeError:
            self._close()

    def _close(self) -> None:
        self.closed = True
        if self.on_closed is not None:
            self.on_closed()
