"""A coroutine in a thread of its own ends with its caller.

Where an interrupt comes, no loop runs in the caller's thread: a test's own would catch it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from p2ptrain.aio import event_loop

SECONDS = 10.0
"""Far longer than any of this takes: a thread that is not stopped must not hang the tests."""

needs_signals = pytest.mark.skipif(
    sys.platform == "win32", reason="Windows cannot send a signal to one thread"
)


def _press_stop() -> None:
    """As Ctrl-C and a notebook's stop button: KeyboardInterrupt in the waiting thread."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


async def test_a_result_comes_back_from_beside_a_running_loop() -> None:
    async def main() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    assert event_loop.run_in_own_thread(main()) == "p2ptrain"


async def test_an_error_comes_back() -> None:
    async def main() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        event_loop.run_in_own_thread(main())


@needs_signals
def test_an_interrupted_caller_ends_what_it_waits_for() -> None:
    told: list[str] = []

    async def main() -> None:
        try:
            _press_stop()
            await asyncio.wait_for(asyncio.Event().wait(), SECONDS)
        finally:
            await asyncio.sleep(0)  # it leaves the household
            told.append("left")

    with pytest.raises(KeyboardInterrupt):
        event_loop.run_in_own_thread(main())
    assert told == ["left"]


@needs_signals
def test_an_interrupt_before_its_loop_runs_counts_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loading an event loop takes a moment, and so does the thread's start."""
    cancelled = threading.Event()
    run, cancel = event_loop.run, event_loop._LoopThread._cancel

    def late_run(main: Coroutine[Any, Any, None]) -> None:
        _press_stop()
        assert cancelled.wait(SECONDS)
        run(main)

    def cancel_early(self: event_loop._LoopThread[None]) -> None:
        cancel(self)
        cancelled.set()

    async def main() -> None:
        await asyncio.wait_for(asyncio.Event().wait(), SECONDS)

    monkeypatch.setattr(event_loop, "run", late_run)
    monkeypatch.setattr(event_loop._LoopThread, "_cancel", cancel_early)
    with pytest.raises(KeyboardInterrupt):
        event_loop.run_in_own_thread(main())


@needs_signals
def test_a_second_interrupt_does_not_wait_and_hurries_the_leaving() -> None:
    hurried = threading.Event()

    async def main() -> None:
        try:
            _press_stop()
            await asyncio.wait_for(asyncio.Event().wait(), SECONDS)
        finally:
            try:
                _press_stop()
                await asyncio.wait_for(asyncio.Event().wait(), SECONDS)  # a slow leave
            finally:
                hurried.set()

    with pytest.raises(KeyboardInterrupt):
        event_loop.run_in_own_thread(main())
    assert hurried.wait(SECONDS)


@needs_signals
def test_what_fails_while_it_is_stopped_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        try:
            _press_stop()
            await asyncio.wait_for(asyncio.Event().wait(), SECONDS)
        finally:
            raise OSError("the disk is full")

    with pytest.raises(KeyboardInterrupt):
        event_loop.run_in_own_thread(main())
    assert "the disk is full" in caplog.text
