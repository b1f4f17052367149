"""Events as plain lines: for log files, pipes and the long life of `p2ptrain join`."""

from __future__ import annotations

import time
from collections.abc import Callable

from p2ptrain.observe.describe import describe
from p2ptrain.observe.events import Event, Step
from p2ptrain.observe.renderer import LineWriter

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
