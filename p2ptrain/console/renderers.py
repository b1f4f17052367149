"""Renderers of events: JSON lines for programs, plain lines for logs, a console for users.

Commands know only `Renderer`; `cli.output` decides once which one it is. JSON is one object a line
(RFC 8259, so no NaN), flushed. Plain lines are for log files, pipes and the long life of
`p2ptrain join`.
"""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from p2ptrain.console.describe import describe
from p2ptrain.events import Event, Step


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


class JsonRenderer:
    """Writes each event as one line of JSON."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def show(self, event: Event) -> None:
        """Write `event`."""
        self._writer.write(dump_line(event.to_json()))

    def close(self) -> None:
        """Nothing to end: every line went out when it was shown."""


def dump_line(body: Mapping[str, Any]) -> str:
    """`body` as JSON on one line; numbers that JSON does not have (NaN, infinity) become null."""
    try:
        return json.dumps(body, allow_nan=False, ensure_ascii=False)
    except ValueError:
        return json.dumps(_finite(body), allow_nan=False, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


STEP_INTERVAL_SECONDS = 1.0
"""A small model does a hundred steps a second: a log wants at most this many lines of them."""


class PlainRenderer:
    """Writes a line an event; of steps the first, then at most one every interval."""

    def __init__(self, writer: LineWriter, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._writer = writer
        self._monotonic = monotonic
        self._next_step_at = 0.0
        self._held_back: Step | None = None

    def show(self, event: Event) -> None:
        """Write `event`, or keep a step back until another one or another event comes."""
        if isinstance(event, Step) and self._monotonic() < self._next_step_at:
            self._held_back = event
            return
        self._release(unless=event)
        if isinstance(event, Step):
            self._next_step_at = self._monotonic() + STEP_INTERVAL_SECONDS
        if line := describe(event):
            self._writer.write(line)

    def close(self) -> None:
        """Write the last step if it was kept back."""
        self._release(unless=None)

    def _release(self, unless: Event | None) -> None:
        """The step kept back is superseded by a newer step, but stands before anything else."""
        held, self._held_back = self._held_back, None
        if held is not None and not isinstance(unless, Step):
            self._writer.write(describe(held))
