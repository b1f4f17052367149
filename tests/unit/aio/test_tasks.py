"""What comes out of a scope of tasks: what went wrong, not what it was wrapped in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine

import pytest

from p2ptrain.aio.tasks import TaskOwner, TaskScope, run_in_background
from p2ptrain.errors import PeerError


class _AppsOwn(Exception):
    pass


async def _fails(error: BaseException) -> None:
    raise error


async def _in_a_scope(
    body: Coroutine[object, object, None], task: Coroutine[object, object, None] | None = None
) -> None:
    async with TaskScope() as tasks:
        if task is not None:
            tasks.spawn(task, "task")
        await body


async def test_what_the_body_raises_comes_out_as_it_is() -> None:
    error = _AppsOwn("mine")
    with pytest.raises(_AppsOwn) as raised:
        await _in_a_scope(_fails(error), asyncio.Event().wait())  # type: ignore[arg-type]
    assert raised.value is error


async def test_a_group_that_the_body_raises_comes_out_as_it_is() -> None:
    error = ExceptionGroup("two of mine", [_AppsOwn("one"), KeyError("other")])
    with pytest.raises(ExceptionGroup) as raised:
        await _in_a_scope(_fails(error))
    assert raised.value is error


async def test_an_error_of_ours_in_a_task_is_raised_alone() -> None:
    error = PeerError("gone")
    with pytest.raises(PeerError) as raised:
        await _in_a_scope(asyncio.sleep(3600), _fails(error))
    assert raised.value is error


async def test_where_the_body_and_a_task_fail_both_are_reported() -> None:
    async def body() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise _AppsOwn("mine")

    with pytest.raises(ExceptionGroup) as raised:
        await _in_a_scope(body(), _fails(PeerError("gone")))
    assert {type(error) for error in raised.value.exceptions} == {_AppsOwn, PeerError}


async def test_the_result_comes_back_from_another_thread() -> None:
    assert await run_in_background(threading.get_ident) != threading.get_ident()


async def test_what_it_raises_reaches_the_caller() -> None:
    def fail() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await run_in_background(fail)


async def test_the_end_of_an_iterator_reaches_the_caller_too() -> None:
    """No future takes it: who awaited one would wait for ever."""
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


async def test_a_failure_is_heard_of_and_the_others_go_on() -> None:
    heard: list[tuple[str, str]] = []
    tasks = TaskOwner(lambda name, error: heard.append((name, str(error))))
    release = asyncio.Event()

    async def fail() -> None:
        raise ValueError("broken")

    async def wait() -> None:
        await release.wait()

    tasks.spawn(fail(), "one")
    other = tasks.spawn(wait(), "other")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert heard == [("one", "broken")]
    assert not other.done()
    release.set()
    await tasks.done()
    assert other.done()
    assert not other.cancelled()


async def test_cancelled_tasks_have_ended_and_are_no_failure() -> None:
    heard: list[str] = []
    tasks = TaskOwner(lambda name, error: heard.append(name))
    cleaned = False

    async def work() -> None:
        nonlocal cleaned
        try:
            await asyncio.Event().wait()
        finally:
            cleaned = True

    task = tasks.spawn(work(), "work")
    await asyncio.sleep(0)
    await tasks.cancel()
    assert cleaned
    assert task.cancelled()
    assert not heard


async def test_done_waits_for_what_is_started_meanwhile() -> None:
    tasks = TaskOwner(lambda name, error: None)
    order: list[int] = []

    async def second() -> None:
        order.append(2)

    async def first() -> None:
        tasks.spawn(second(), "second")
        order.append(1)

    tasks.spawn(first(), "first")
    await tasks.done()
    assert order == [1, 2]
