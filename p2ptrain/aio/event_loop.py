"""The event loop that commands run on, and a loop in a thread for notebooks.

uvloop is used where it is installed: a small message takes two turns of the loop, and on a device
with a fifth of a core a turn of asyncio's own costs several times as much. uvloop does not exist
for Windows. Its clock stands still within a turn, and timers count whole milliseconds.

A notebook's loop already runs in the caller's thread, so the coroutine gets a thread of its own.
The stop button raises KeyboardInterrupt in the caller's thread, which must end the coroutine too: a
training that ran on unseen would keep its identity and its port.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from p2ptrain.logs import get_logger

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`."""
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(main)


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """None = asyncio's."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


LOOK_SECONDS = 0.2
"""On Windows nothing interrupts a wait without an end."""

_log = get_logger(__name__)


def run_in_own_thread(main: Coroutine[Any, Any, T]) -> T:
    """As `event_loop.run`, in a thread of its own; blocks.

    An interrupt of the caller cancels `main` and is raised again once `main` has ended. A second
    one is raised at once, and `main` leaves without the time for what it still wanted to do.
    """
    return _LoopThread(main).result()


class _LoopThread(Generic[T]):
    def __init__(self, main: Coroutine[Any, Any, T]) -> None:
        self._main = main
        self._outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._lock = threading.Lock()  # of what follows
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._cancelled = False

    def result(self) -> T:
        """Start, and wait for the end."""
        # A daemon: after a second interrupt neither a caller nor the process waits for it.
        thread = threading.Thread(target=self._run, name="p2ptrain", daemon=True)
        try:
            thread.start()
            self._wait()
        except BaseException:
            self._cancel()
            self._wait_cancelled()
            raise
        return self._outcome.result()

    def _run(self) -> None:
        try:
            self._outcome.set_result(run(self._watched()))
        except BaseException as error:  # raised again by the caller
            self._outcome.set_exception(error)

    async def _watched(self) -> T:
        """`main`, while it can be cancelled from outside."""
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            self._running = asyncio.get_running_loop(), task
            if self._cancelled:
                task.cancel()
        try:
            return await self._main
        finally:
            with self._lock:
                self._running = None

    def _cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._running is not None:
                loop, task = self._running
                loop.call_soon_threadsafe(task.cancel)

    def _wait(self) -> None:
        # Not `Thread.join`: once interrupted it takes a running thread for an ended one.
        while not concurrent.futures.wait([self._outcome], LOOK_SECONDS).done:
            pass

    def _wait_cancelled(self) -> None:
        try:
            self._wait()
        except BaseException:
            self._cancel()  # the second time, a member leaves at once
            raise
        error = self._outcome.exception()
        if error is not None and not isinstance(error, asyncio.CancelledError):
            _log.warning("failed_when_interrupted", why=str(error) or type(error).__name__)
