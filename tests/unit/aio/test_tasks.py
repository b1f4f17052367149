"""What comes out of a scope of tasks: what went wrong, not what it was wrapped in."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest

from p2ptrain.aio.tasks import TaskScope
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
