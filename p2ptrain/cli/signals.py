"""Signals and events as things a coroutine can wait for."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_STOPS = (signal.SIGINT, signal.SIGTERM)

if sys.platform == "win32":
    _HANGUPS = (signal.SIGBREAK,)  # Ctrl-Break; for a closed window see `_console_closes`
else:
    _HANGUPS = (signal.SIGHUP,)  # the terminal's window is closed

_LEAVE_SECONDS = 4.5
"""Windows ends a process five seconds after its window was closed."""

_Handlers = dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None]


@contextlib.contextmanager
def stop_event() -> Iterator[asyncio.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; the second one interrupts as usual.

    A closed terminal sets it too, unless that was to be ignored (nohup); it may say so twice.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    hangups = [n for n in _HANGUPS if signal.getsignal(n) is not signal.SIG_IGN]
    previous: _Handlers = {number: signal.getsignal(number) for number in (*_STOPS, *hangups)}

    def on_signal() -> None:
        stop.set()
        _restore(loop, previous)
        for number in hangups:
            signal.signal(number, signal.SIG_IGN)

    for number in previous:
        _handle(loop, number, on_signal)
    try:
        with _console_closes(lambda: loop.call_soon_threadsafe(on_signal)):
            yield stop
    finally:
        _restore(loop, previous)


def _handle(
    loop: asyncio.AbstractEventLoop, number: signal.Signals, action: Callable[[], None]
) -> None:
    try:
        loop.add_signal_handler(number, action)  # wakes the loop whichever thread is signalled
    except NotImplementedError:  # Windows
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(action))


def _restore(loop: asyncio.AbstractEventLoop, previous: _Handlers) -> None:
    for number, handler in previous.items():
        with contextlib.suppress(NotImplementedError):
            loop.remove_signal_handler(number)
        signal.signal(number, handler)


if sys.platform == "win32":
    import ctypes

    _CLOSES = (2, 5, 6)  # the window is closed, the user logs off, the machine shuts down

    @contextlib.contextmanager
    def _console_closes(action: Callable[[], object]) -> Iterator[None]:
        """Call `action` when the window closes; the process ends when the context is left."""
        left = threading.Event()

        @ctypes.WINFUNCTYPE(ctypes.c_int, ctypes.c_uint)
        def on_event(kind: int) -> int:  # Windows calls it in a thread of its own
            if kind not in _CLOSES:
                return 0
            action()
            left.wait(_LEAVE_SECONDS)
            return 1

        ctypes.windll.kernel32.SetConsoleCtrlHandler(on_event, 1)
        try:
            yield
        finally:
            left.set()
            ctypes.windll.kernel32.SetConsoleCtrlHandler(on_event, 0)

else:

    @contextlib.contextmanager
    def _console_closes(action: Callable[[], object]) -> Iterator[None]:
        """Elsewhere that is a signal."""
        yield


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[Callable[[], None]]:
    """Treat SIGTERM as Ctrl-C meanwhile; yields a way to interrupt this very process.

    A shell script's background job (`p2ptrain train ... &`) starts with SIGINT ignored; asyncio
    would leave it so, and the SIGTERM of `kill` would then do nothing.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    previous = {number: signal.getsignal(number) for number in _STOPS}
    if previous[signal.SIGINT] is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield lambda: signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
