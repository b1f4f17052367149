"""Signals and events as things a coroutine can wait for."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_STOPS = (signal.SIGINT, signal.SIGTERM)
_Handlers = dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None]


@contextlib.contextmanager
def stop_event() -> Iterator[asyncio.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; the second one interrupts as usual."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    previous: _Handlers = {number: signal.getsignal(number) for number in _STOPS}

    def on_signal() -> None:
        stop.set()
        _restore(previous)

    for number in _STOPS:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(on_signal))
    try:
        yield stop
    finally:
        _restore(previous)


def _restore(previous: _Handlers) -> None:
    for number, handler in previous.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[Callable[[], None]]:
    """Treat SIGTERM as Ctrl-C meanwhile; yields a way to interrupt this very process."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield lambda: signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, previous)


async def first_of(*events: asyncio.Event) -> None:
    """Return once one of `events` is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
