"""Tasks of one object: none is forgotten, none fails unheard."""

from __future__ import annotations

import asyncio

from p2ptrain.aio.tasks import TaskOwner


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
