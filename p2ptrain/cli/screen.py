"""The household and its job in a terminal's columns: for `train`, `top` and `status`.

What they draw is the page's state. Names and sentences come from other devices, so they are shown
as `Text`, never as rich's markup. No line is longer than the terminal is wide; in a file or pipe,
which has no width, none is broken.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from p2ptrain.api.course_sentences import duration
from p2ptrain.console import metrics_text
from p2ptrain.errors import size_text
from p2ptrain.events import Eval
from p2ptrain.net.forms import one_line
from p2ptrain.page.state import DeviceView, JobView, PageState

WIDE_COLUMNS = 100
"""From here on there is room for numbers of each device."""

WIDEST_COLUMNS = 120

_STYLES = {"busy": "green", "ready": "cyan", "idle": "yellow", "trouble": "bold red", "gone": "dim"}

_ENDLESS_COLUMNS = 10_000

_NOTES = 4

_OTHER_LINES = 9 + _NOTES
"""Above and below the devices."""


def user_console(stream: TextIO) -> Console:
    """A console on `stream`, in ASCII where its user's language settings have nothing else."""
    if _wants_ascii() and hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="ascii", errors="backslashreplace")
    return Console(file=stream, highlight=False, markup=False, emoji=False)


def _wants_ascii() -> bool:
    """LANG=C. Python writes UTF-8 all the same, and sets LC_CTYPE so (PEP 538, 540)."""
    said = [os.environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG")]
    if said[:2] == ["", "C.UTF-8"]:
        del said[1]
    return next(filter(None, said), "") in ("C", "POSIX")


@dataclass(frozen=True, slots=True)
class Space:
    """What there is on a screen; None: as much as it takes."""

    columns: int | None = None
    lines: int | None = None


def household(state: PageState, space: Space) -> RenderableType:
    """The job, what each device does, what limits."""
    parts: list[RenderableType] = []
    if state.job is not None:
        parts += _job(state, state.job, has_bar=space.columns is not None)
    parts.append(_devices(state.devices, space))
    if state.job is not None and state.job.limit:
        parts.append(_text(f"Now: {state.job.limit}", "bold"))
    if state.job is not None and state.job.energy:
        parts.append(_text(f"Energy: {state.job.energy}", "dim"))
    return Group(*parts)


def whole(state: PageState, space: Space) -> RenderableType:
    """The same with who plans, what has happened lately, and how old it is."""
    about = state.household
    planner = about.coordinator or "no device yet"
    head = f"{about.name}, p2ptrain {about.version}; plans the work: {planner}"
    lately = [_text(note.text, "dim") for note in state.notes[-_NOTES:]]
    parts = [_text(head, "bold"), household(state, space), *lately]
    if state.job is None:
        parts.insert(1, _text("training: none"))
    if about.notice is not None:
        parts.append(_text(about.notice, "bold red"))
    return Group(*parts)


def _job(state: PageState, job: JobView, *, has_bar: bool) -> Iterator[RenderableType]:
    yield _text(job.headline, "bold")
    left = "" if job.seconds_left is None else f"{duration(job.seconds_left)} left"
    if job.steps and has_bar:
        line = Table.grid(padding=(0, 2, 0, 0), expand=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        line.add_column(no_wrap=True)
        done = min(job.step / job.steps, 1.0)
        line.add_row(ProgressBar(total=1.0, completed=done), f"{done:.0%}", left)
        yield line
        left = ""
    numbers = [*_numbers(state, job), *filter(None, [left])]
    if numbers:
        yield _text("   ".join(numbers))
    if job.state not in ("training", "done"):
        yield _text(job.sentence, "yellow")


def _numbers(state: PageState, job: JobView) -> Iterator[str]:
    if job.loss is not None:
        yield f"loss {job.loss:.4f}"
    if job.samples_per_s is not None:
        planned = job.predicted_samples_per_s
        of_plan = f" (plan: {planned:,.0f})" if planned else ""
        yield f"{job.samples_per_s:,.1f} samples/s{of_plan}"
    if job.tokens_per_s is not None:
        yield f"{job.tokens_per_s:,.0f} tokens/s"
    if job.lr is not None:
        yield f"lr {job.lr:.3g}"
    evals = () if state.curve is None else state.curve.evals
    if evals:
        last = evals[-1]
        yield f"at step {last.step:,}: {metrics_text(Eval(last.step, last.metrics))}"


def _devices(devices: tuple[DeviceView, ...], space: Space) -> RenderableType:
    is_wide = space.columns is None or space.columns >= WIDE_COLUMNS
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("device", overflow="fold", max_width=24)
    table.add_column("state", no_wrap=True)
    if is_wide:
        table.add_column("alone", justify="right", no_wrap=True)
        table.add_column("memory", justify="right", no_wrap=True)
    has_room = space.columns is None or space.columns >= WIDEST_COLUMNS
    says = has_room and any(map(_condition, devices))
    if says:
        table.add_column("machine", no_wrap=True)
    table.add_column("", overflow="fold")
    most = len(devices) if space.lines is None else max(3, space.lines - _OTHER_LINES)
    shown = devices[:most]
    for device in shown:
        here = " (here)" if device.is_here and device.name != "here" else ""
        cells = [_text(f"{device.name}{here}"), _text(device.tone, _STYLES.get(device.tone, ""))]
        if is_wide:
            cells += [_text(_alone(device)), _text(_memory(device))]
        if says:
            cells.append(_text(_condition(device)))
        table.add_row(*cells, _text(device.sentence))
    if len(shown) == len(devices):
        return table
    more = _text(f"and {len(devices) - len(shown)} more: p2ptrain status shows all", "dim")
    return Group(table, more)


def _alone(device: DeviceView) -> str:
    return "" if device.alone_samples_per_s is None else f"{device.alone_samples_per_s:,.0f}/s"


def _memory(device: DeviceView) -> str:
    host = _taken(device.used_bytes, device.needed_bytes, device.memory_bytes)
    card = _taken(device.card_used_bytes, device.card_needed_bytes, device.card_offered_bytes)
    return f"{host}; card {card}" if card else host


def _taken(used_bytes: int | None, needed_bytes: int | None, all_bytes: int | None) -> str:
    """Of one memory."""
    if all_bytes is None:
        return ""
    known = ((used_bytes, "used"), (needed_bytes, "planned"))
    parts = [f"{size_text(part)} {word}" for part, word in known if part is not None]
    of_all = size_text(all_bytes)
    return f"{', '.join(parts)} of {of_all}" if parts else of_all


def _condition(device: DeviceView) -> str:
    """What it says of itself: its processor in use by others, its battery, its warmth."""
    battery, warmth = device.battery_percent, device.temperature_c
    said = [
        "" if device.others_cpu_percent is None else f"{device.others_cpu_percent}% used",
        "" if battery is None else f"{battery}%{' on mains' if device.power == 'mains' else ''}",
        "" if warmth is None else f"{warmth} C",
    ]
    return ", ".join(filter(None, said))


def _text(text: str, style: str = "") -> Text:
    return Text(one_line(text), style=style, overflow="fold")


def as_text(state: PageState, stream: TextIO, *, is_terminal: bool) -> str:
    """`whole` for `stream`: in colours and lines of a terminal, or as plain lines."""
    if is_terminal:
        console = user_console(stream)
        drawn = whole(state, Space(console.width))
    else:
        console = Console(file=io.StringIO(), width=_ENDLESS_COLUMNS, color_system=None)
        drawn = whole(state, Space())
    with console.capture() as capture:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
