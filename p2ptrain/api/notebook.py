"""A run in a notebook: drawn again each second, with a stop button where there are widgets.

IPython is used where it runs already, and never loaded; ipywidgets where it is installed.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from p2ptrain import markup
from p2ptrain.api import course_sentences as sentences
from p2ptrain.api.job_course import ENDED, JobCourse
from p2ptrain.console import metrics_text
from p2ptrain.events import Eval
from p2ptrain.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")

REFRESH_SECONDS = 1.0

STOP = "To stop it: run.stop()"


class ShownRun(Protocol):
    """What is drawn: a `Run`, whose module imports this one."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""

    def stop(self) -> None:
        """Begin to end it."""

    def as_html(self, advice: str = "") -> str:
        """As it is now; `advice`: how to stop it."""


def course_html(course: JobCourse, advice: str = "") -> str:
    """A job as small static HTML. `advice`: how to stop it, while it runs."""
    left = sentences.seconds_left(course)
    parts = [
        markup.paragraph(sentences.headline(course), bold=True),
        markup.paragraph(sentences.job_sentence(course, left)),
    ]
    numbers = "   ".join(_numbers(course))
    parts += [markup.paragraph(numbers)] if numbers else []
    if course.plan is not None:
        names = [device.name for stage in course.plan.stages for device in stage.devices]
        rows = [(name, sentences.part_of(course.plan, name) or "") for name in dict.fromkeys(names)]
        rows += [(out.name, f"not used: {out.reason}") for out in course.plan.left_out]
        parts.append(markup.table(("device", "computes"), rows))
    if course.limit:
        parts.append(markup.paragraph(f"Now: {course.limit}"))
    points = [(float(point.step), point.loss) for point in course.points]
    parts.append(markup.curve(points, "loss by step"))
    if advice and course.state not in ENDED:
        parts.append(markup.paragraph(advice))
    return f'<div class="p2ptrain">{"".join(parts)}</div>'


def _numbers(course: JobCourse) -> list[str]:
    found = []
    if course.last is not None and course.last.loss is not None:
        found.append(f"loss {course.last.loss:.4f}")
    speed = sentences.speed_lately(course)
    if speed is not None:
        found.append(f"{speed:,.1f} samples/s")
    if course.evals:
        last = course.evals[-1]
        found.append(f"at step {last.step:,}: {metrics_text(Eval(last.step, last.metrics))}")
    return found


def is_here() -> bool:
    """This process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def show(run: ShownRun, refresh_seconds: float = REFRESH_SECONDS) -> asyncio.Future[None]:
    """Display a run in the cell that asks for it, from now to its end; returns at once."""
    button = _stop_button(run.stop)
    advice = STOP if button is None else ""
    if button is not None:
        _display(button)
    task = asyncio.ensure_future(keep_drawn(run, advice, _drawn(run, advice), refresh_seconds))
    if button is not None:
        task.add_done_callback(lambda _: setattr(button, "disabled", True))
    _drawing.add(task)
    task.add_done_callback(_drawing.discard)
    return task


_drawing: set[asyncio.Future[None]] = set()  # the loop itself keeps no reference


def _drawn(run: ShownRun, advice: str) -> Any:
    """Draw it at once: a cell's displays come before the cell ends. Returns the display."""
    return _display(_Html(run, advice))


async def keep_drawn(
    run: ShownRun, advice: str, handle: Any, refresh_seconds: float = REFRESH_SECONDS
) -> None:
    """Draw it again and again, until it has ended. `advice`: how to stop it."""
    try:
        while not run.done:
            await asyncio.sleep(refresh_seconds)
            handle.update(_Html(run, advice))
    finally:
        handle.update(_Html(run, advice))


async def drawn_result(run: ShownRun, result: Awaitable[T]) -> T:
    """`result` of a run, which is drawn meanwhile where this is a notebook."""
    if not is_here():
        return await result
    advice = "To stop it: the notebook's own stop button"
    drawing = asyncio.ensure_future(keep_drawn(run, advice, _drawn(run, advice)))
    try:
        return await result
    finally:
        drawing.cancel()
        (ended,) = await asyncio.gather(drawing, return_exceptions=True)
        if isinstance(ended, Exception):
            log.warning("not_drawn", why=str(ended))


def _stop_button(stop: Callable[[], None]) -> Any | None:
    try:
        widgets = importlib.import_module("ipywidgets")
    except ImportError:
        return None
    button = widgets.Button(description="Stop training", icon="stop")
    button.on_click(lambda _: stop())
    return button


def _display(what: Any) -> Any:
    return sys.modules["IPython"].display.display(what, display_id=True)


class _Html:
    """A run as it is now, without being shown live once more."""

    def __init__(self, run: ShownRun, advice: str) -> None:
        self._html, self._text = run.as_html(advice), repr(run)

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return self._html
