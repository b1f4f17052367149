"""Long work in threads that the process does not wait for when it ends.

`asyncio.to_thread` waits for its threads when the loop closes, and a thread inside torch.export or
a user's dataset cannot be interrupted: Ctrl-C would take seconds.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_in_background(function: Callable[[], T]) -> T:
    """Run `function` in a daemon thread of its own; raises whatever it raises (`for_futures`).

    A cancelled caller leaves at once; the function runs on and its result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(for_futures(error))

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # handed to the one who awaits it
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="p2ptrain-background", daemon=True).start()
    return await future


def for_futures(error: BaseException) -> BaseException:
    """What a future takes: not StopIteration, which would make its waiters wait for ever."""
    if not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError("StopIteration was raised")
    wrapped.__cause__ = error
    return wrapped
