"""Output of a command: results on stdout, logs and errors on stderr, never mixed.

With `--json`, stdout is a stream of JSON lines that programs parse. A training script may print,
and so may a C library underneath, so the real stdout is kept aside and file descriptor 1 is made
to lead to stderr.

Events are JSON lines for programs (RFC 8259, so no NaN), plain lines for logs and pipes, or a live
display: commands know only `Renderer`.

It also has text in columns, for short lists, and QR codes, so that a phone need not type.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from p2ptrain.console import describe
from p2ptrain.errors import UserError, size_text
from p2ptrain.events import Event, Step
from p2ptrain.logs import get_logger

if TYPE_CHECKING:
    from p2ptrain.cli.live import LiveRenderer
    from p2ptrain.page.state import PageState

_log = get_logger(__name__)


class Output:
    """What a command says.

    Attributes:
        json: stdout carries JSON lines.
        stream, writer: stdout, and its lines.
    """

    def __init__(self, stream: TextIO, *, json: bool) -> None:
        self.json = json
        self.writer = LineWriter(stream)
        self.stream = stream
        self._failing = False  # the last event could not be shown
        self._renderer: Renderer = JsonRenderer(self.writer) if json else PlainRenderer(self.writer)

    @property
    def is_terminal(self) -> bool:
        """A user reads this."""
        return not self.json and self.stream.isatty()

    def use(self, renderer: Renderer) -> None:
        """Show events this way from now on."""
        self.close()
        self._renderer = renderer

    def show_live(self, model: str, total_steps: int | None) -> LiveRenderer | None:
        """Where a user reads this, show a job as a view that is drawn again and again."""
        if not self.is_terminal:
            return None
        from p2ptrain.cli.live import LiveRenderer, SeenByEvents  # here: most commands need none
        from p2ptrain.cli.screen import user_console

        console = user_console(self.stream)
        if console.is_dumb_terminal:
            return None
        live = LiveRenderer(console, SeenByEvents(model, total_steps))
        self.use(live)
        return live

    def draw(self, state: PageState) -> str:
        """The household as text: in a terminal's columns, or as plain lines."""
        from p2ptrain.cli.screen import as_text

        return as_text(state, self.stream, is_terminal=self.is_terminal)

    def show(self, event: Event) -> None:
        """Show an event; one that cannot be shown is passed over."""
        self._attempt(lambda: self._renderer.show(event))

    def result(self, body: Mapping[str, Any], text: str) -> None:
        """A command's answer: `body` with `--json`, `text` for users."""
        self.writer.write(dump_line(body) if self.json else text)

    def close(self) -> None:
        """End the display."""
        self._attempt(self._renderer.close)

    def _attempt(self, show: Callable[[], None]) -> None:
        """Training does not end because a log's disk is full or the terminal is gone.

        A warning says so, once; what comes later is tried again.
        """
        try:
            show()
        except OSError as error:
            if not self._failing:
                _log.warning("events_not_shown", why=str(error))
            self._failing = True
        else:
            self._failing = False


@contextlib.contextmanager
def open_output(*, json: bool, for_good: bool = False) -> Iterator[Output]:
    """stdout as this command writes it; with `json`, everything else's prints go to stderr.

    Args:
        for_good: also afterwards, when a script's threads may still print, and what it has left
            for the end of the process.
    """
    if not json:
        output = Output(sys.stdout, json=False)
        with contextlib.closing(output):
            yield output
        return
    with _stdout_kept_aside(for_good) as stream:
        output = Output(stream, json=True)
        with contextlib.closing(output):
            yield output


@contextlib.contextmanager
def _stdout_kept_aside(for_good: bool) -> Iterator[TextIO]:
    """Yield the real stdout; meanwhile file descriptor 1 and `sys.stdout` lead to stderr."""
    before = sys.stdout
    before.flush()
    descriptor = os.dup(1)
    stream = open(descriptor, "w", encoding="utf-8", newline="\n", closefd=False)  # noqa: SIM115
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield stream
    finally:
        with contextlib.suppress(OSError):  # stderr is gone, or its disk full
            before.flush()  # what a script wrote to `sys.__stdout__` still waits in there
        if not for_good:
            sys.stdout = before
            os.dup2(descriptor, 1)
        with contextlib.suppress(OSError):  # a reader that is gone, a full disk: that was said
            stream.close()
        os.close(descriptor)


LOG_LIMIT_BYTES = 1_000_000


def write_to(file: Path, limit_bytes: int = LOG_LIMIT_BYTES) -> None:
    """Append all that comes to stdout and stderr to `file` instead; a large one begins again.

    What `--json` prints comes to stdout all the same.

    Raises:
        UserError: it cannot be written.
    """
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if os.fstat(descriptor).st_size > limit_bytes:
            os.ftruncate(descriptor, 0)
    except OSError as error:
        raise UserError(f"--log-file {file} cannot be written: {error.strerror}") from error
    sys.stdout.flush()
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


def silence_stdout() -> None:
    """Let what is still buffered go nowhere, so that the interpreter's last flush cannot fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def configure_logs(*, debug: bool) -> None:
    """Logs as lines on stderr: warnings, and with `--debug` everything."""
    from p2ptrain.logs import log_to_stderr  # here: --help and --version need no logs

    log_to_stderr(debug=debug)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """`rows` as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def words(values: Mapping[str, Any]) -> str:
    """`key value, key value`, without what is not set; underscores as spaces."""
    return ", ".join(
        _phrase(key, value)
        for key, value in values.items()
        if value is not None and not isinstance(value, Mapping | list | tuple)
    )


def _phrase(key: str, value: Any) -> str:
    name = key.removesuffix("_bytes").replace("_", " ")
    if isinstance(value, bool):
        return name if value else f"not {name}"
    if isinstance(value, int) and key.endswith("_bytes"):
        return f"{name} {size_text(value)}"
    return f"{name} {value:,.1f}" if isinstance(value, float) else f"{name} {value}"


def terminal_code(text: str) -> str:
    """`text` as a QR code in block characters, several lines."""
    import segno

    out = io.StringIO()
    segno.make(text, micro=False).terminal(out, border=2, compact=True)
    return out.getvalue().rstrip("\n")


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
