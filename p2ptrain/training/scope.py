"""A task group that raises one error instead of a group of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def task_scope() -> AsyncIterator[asyncio.TaskGroup]:
    """As `asyncio.TaskGroup`, but what failed first is raised bare.

    The other errors of a group are nearly always consequences of the first, and its class is what
    callers decide by.
    """
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise first_error(failures) from None


def first_error(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf of an exception group."""
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
