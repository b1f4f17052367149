"""A training run on a terminal: what happens as lines, and below them a view that is drawn again.

All is written by a thread of its own: a terminal that stands still (Ctrl-S, a slow connection)
never stops training. The cursor stays visible, so a process that is killed leaves it so.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from dataclasses import replace
from time import monotonic, time

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.text import Text

from p2ptrain import events
from p2ptrain._version import __version__
from p2ptrain.api.job_course import ENDED, CourseAsked, CourseKeeper
from p2ptrain.api.views import MemberStatus, NodeStatus
from p2ptrain.cli.screen import Space, household
from p2ptrain.console import describe, metrics_text, plan_head
from p2ptrain.logs import get_logger
from p2ptrain.net.forms import one_line
from p2ptrain.page.state import DeviceView, PageState
from p2ptrain.page.view import Seen, page_state

log = get_logger(__name__)

REFRESH_SECONDS = 1.0

LEAST_SECONDS = 0.25
"""Between two drawings, however much happens."""

WAITING_LINES = 1000
"""Of a terminal that stands still; the oldest go."""

CLOSE_SECONDS = 5.0

HERE = "here"


class LiveRenderer:
    """Lines of what happens above a view of the job and its devices.

    Attributes:
        state: what is drawn; None: what the events have said.
    """

    def __init__(self, console: Console, seen: SeenByEvents) -> None:
        self.state: PageState | None = None
        self._console = console
        self._seen = seen
        self._lines: deque[Text] = deque(maxlen=WAITING_LINES)
        self._kept: deque[Text] = deque(maxlen=20)  # to be written again after a resize
        self._last: Text | None = None  # below the view
        self._devices: tuple[DeviceView, ...] = ()
        self._columns = console.width
        self._is_live = False
        self._live = Live(console=console, auto_refresh=False)
        self._wanted, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)

    def show(self, event: events.Event) -> None:
        """Show `event`, soon."""
        self._seen.note(event)
        line = _line(event)
        if isinstance(event, events.Done):
            self._last = line
        elif line is not None:
            self._lines.append(line)
        self._is_live |= isinstance(event, events.Plan | events.Step)
        if not isinstance(event, events.Step):
            self._wanted.set()
        if self._thread.ident is None:
            self._thread.start()

    def limited(self, limit: str) -> None:
        """What limits the training now, for where only events are seen."""
        self._seen.limit = limit

    def close(self) -> None:
        """End it; what was shown stays on the screen."""
        self._over.set()
        self._wanted.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)

    # -- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._wanted.wait(REFRESH_SECONDS)
                self._wanted.clear()
                self._draw()
                self._over.wait(LEAST_SECONDS)
            self._draw()
            self._live.stop()
            if self._last is not None:
                self._console.print(self._last)
        except OSError as error:
            log.warning("terminal_gone", why=str(error))

    def _draw(self) -> None:
        size = self._console.size
        if size.width < self._columns and self._live.is_started:
            self._start_again(size.height)
        self._columns = size.width
        if self._is_live and not self._live.is_started:
            self._live.start()
            self._console.show_cursor(True)
        while self._lines:
            line = self._lines.popleft()
            self._kept.append(line)
            self._console.print(line)
        if self._live.is_started:
            space = Space(size.width, size.height)
            self._live.update(household(self._now(), space), refresh=True)

    def _now(self) -> PageState:
        """At the end, devices still with what they have done."""
        state = self.state or self._seen.state()
        if state.job is not None and state.job.state in ENDED:
            return replace(state, devices=self._devices or state.devices)
        self._devices = state.devices
        return state

    def _start_again(self, height: int) -> None:
        """On an empty screen: some terminals break lines that have become too long, some do not.

        What stood there can be scrolled back to; lines of events are written once more.
        """
        self._live.stop()
        self._console.file.write("\n" * height)
        self._console.clear()
        self._lines.extendleft(reversed(self._kept))
        self._kept.clear()
        self._live = Live(console=self._console, auto_refresh=False)


def _print_past_the_view() -> None:
    """In a forked child, such as a DataLoader's worker: the view's lock may be held there for good,
    by a thread that the child does not have."""
    if isinstance(sys.stdout, FileProxy):
        sys.stdout = sys.__stdout__
    if isinstance(sys.stderr, FileProxy):
        sys.stderr = sys.__stderr__


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_print_past_the_view)


class SeenByEvents:
    """What a command's own events say of the household: for a device alone, and before it joins.

    Attributes:
        limit: what limits the training now, in a sentence; "" where that is not known.
    """

    def __init__(self, model: str, steps: int | None, name: str = HERE) -> None:
        self._keeper = CourseKeeper("", name, model, steps)
        self._began_at, self._began_unix = monotonic(), time()
        self._name = name
        self.limit = ""
        self._states = {name: "alive"}

    def note(self, event: events.Event) -> None:
        """Something has happened."""
        self._keeper.note(event, monotonic() - self._began_at)
        match event:
            case events.Member(name=name, state=state):
                self._states = {**self._states, name: state}
            case events.Failure(name=name):
                self._states = {**self._states, name: "dead"}
            case events.Plan():
                used = [d.name for stage in event.stages for d in stage.devices]
                names = [*used, *(out.name for out in event.left_out)]
                self._states = {**self._states, **dict.fromkeys(names, "alive")}

    def state(self) -> PageState:
        """For drawing; in any thread."""
        course = self._keeper.since(CourseAsked(), monotonic() - self._began_at, self.limit)
        members = tuple(MemberStatus(name, name, state) for name, state in self._states.items())
        status = NodeStatus(self._name, self._name, "", 0, members, None, (), None)
        seen = Seen(status, (), __version__, course, self._began_unix)
        return page_state(seen, may_change=False)


def _line(event: events.Event) -> Text | None:
    """What stays on the screen of an event; None: nothing."""
    match event:
        case events.Step():
            return None
        case events.Plan():
            text, style = plan_head(event), "bold"  # the rest is in the view
        case events.Eval():
            text, style = f"after step {event.step:,}: {metrics_text(event)}", "bold"
        case events.Pairing():
            text, style = describe(event).replace(":  ", ":\n  "), ""  # a command to be copied
        case events.Done():
            text, style = describe(event), "bold green"
        case events.Failure() | events.Error():
            text, style = describe(event), "bold red"
        case events.Waiting() | events.Paused() | events.Warning() | events.PairingFailed():
            text, style = describe(event), "yellow"
        case _:
            text, style = describe(event), "dim"
    if not text:
        return None
    return Text("\n".join(map(one_line, text.split("\n"))), style=style, overflow="fold")
