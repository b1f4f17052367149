from __future__ import annotations

import asyncio
import threading

import pytest

from p2ptrain.aio.tasks import run_in_background


async def test_the_result_comes_back_from_another_thread() -> None:
    assert await run_in_background(threading.get_ident) != threading.get_ident()


async def test_what_it_raises_reaches_the_caller() -> None:
    def fail() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await run_in_background(fail)


async def test_the_end_of_an_iterator_reaches_the_caller_too() -> None:
    """No future takes it: whoever awaited one would wait for ever."""
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        await run_in_background(lambda: next(iter(())))
    assert isinstance(caught.value.__cause__, StopIteration)


def test_a_loop_ends_without_waiting_for_the_thread() -> None:
    gate, ended = threading.Event(), threading.Event()

    def hang() -> None:
        gate.wait(20)
        ended.set()

    async def cancelled() -> None:
        task = asyncio.create_task(run_in_background(hang))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(cancelled())
    assert not ended.is_set()
    gate.set()
    assert ended.wait(20)


async def test_its_threads_do_not_keep_the_process_alive() -> None:
    assert await run_in_background(lambda: threading.current_thread().daemon)
