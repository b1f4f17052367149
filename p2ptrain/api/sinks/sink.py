"""A place that receives the events of a run, in a thread of its own: no sink slows training down.

    start_run --event--> queue of each sink --> its thread --> a file, a tracker, a command

A sink that fails ends, with a warning, and training continues. Where a queue is full its oldest
events are missed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from p2ptrain.events import Eval, Event, Step


class Sink(Protocol):
    """Called in one thread, the same for all calls.

    Attributes:
        name: in words for the user, such as "--log-dir".
        goes_on: it gets further events after one that it has failed with.
    """

    name: str
    goes_on: bool

    def begin(self) -> None:
        """Before the first event."""

    def take(self, event: Event) -> None:
        """What has happened, in order."""

    def end(self) -> None:
        """Nothing more comes."""


@dataclass(frozen=True, slots=True)
class Scalars:
    """Numbers of one step, by name."""

    step: int
    values: Mapping[str, float]


def scalars_of(event: Event) -> Scalars | None:
    """What curves are drawn of; None where an event has no numbers."""
    if isinstance(event, Eval):
        return Scalars(event.step, {f"eval/{name}": value for name, value in event.metrics.items()})
    if not isinstance(event, Step):
        return None
    found = {
        "train/loss": event.loss,
        "train/lr": event.lr,
        "train/samples_per_s": event.samples_per_s,
        "train/tokens_per_s": event.tokens_per_s,
        "train/seconds": event.seconds,
        "train/grad_norm": event.grad_norm,
    }
    if len(event.lrs) > 1:
        found |= {f"train/lr/{group}": rate for group, rate in enumerate(event.lrs)}
    return Scalars(event.step, {name: value for name, value in found.items() if value is not None})


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """Attributes:
    most_waiting: events of one sink.
    end_seconds: for what still waits when the run ends.
    """

    most_waiting: int = 10_000
    end_seconds: float = 30.0


class SinkThread:
    """One sink's thread and queue. `put` never waits; call it from one thread."""

    def __init__(self, sink: Sink, settings: SinkSettings | None = None) -> None:
        self._sink = sink
        self._settings = settings or SinkSettings()
        self._waiting: deque[Event] = deque()
        self._changed = threading.Condition()
        self._is_over = False
        self._missed = 0
        self._trouble: str | None = None  # not said yet
        self._has_failed = False
        name = f"p2ptrain-{sink.name.strip('-')}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Queue an event."""
        with self._changed:
            if self._has_failed:
                return
            if len(self._waiting) == self._settings.most_waiting:
                self._waiting.popleft()
                self._missed += 1
            self._waiting.append(event)
            self._changed.notify()

    def trouble(self) -> str | None:
        """A sentence about what went wrong, once."""
        with self._changed:
            said, self._trouble = self._trouble, None
            return said

    def close(self) -> None:
        """Let it take what waits, for so long at most; blocks."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join(self._settings.end_seconds)
        with self._changed:
            if self._thread.is_alive():
                self._trouble = f"{self._sink.name} was not done in time: its last events are lost"
            elif self._missed and not self._has_failed:
                missed = f"has missed {self._missed} events"
                self._trouble = f"{self._sink.name} was too slow and {missed}"

    def _run(self) -> None:
        try:
            self._sink.begin()
            while (event := self._next()) is not None:
                self._take(event)
            self._sink.end()
        except Exception as error:  # of a library, a disk, a network: said, and training continues
            with self._changed:
                self._has_failed = True
                self._waiting.clear()
                self._trouble = f"{self._sink.name} has failed and gets no more: {_why(error)}"

    def _take(self, event: Event) -> None:
        try:
            self._sink.take(event)
        except Exception as error:
            if not self._sink.goes_on:
                raise
            with self._changed:
                self._trouble = f"{self._sink.name}: {_why(error)}"

    def _next(self) -> Event | None:
        with self._changed:
            while not self._waiting and not self._is_over:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
