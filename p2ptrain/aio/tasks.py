"""Owners of asyncio tasks: no task outlives its owner, and no failure is lost.

`TaskScope` owns the tasks of a mesh: the failure of one ends the mesh. Callbacks of links and
timers may still come during shutdown, where a task group would raise into them; a closed scope
silently starts no more tasks. `TaskOwner` owns tasks that one object starts and ends with itself.
`task_scope` is for work within one `async with`: a task group that raises one error instead of a
group of them. `end_program` is for children that are programs.

`run_in_background` is for long work in threads that the process does not wait for when it ends:
`asyncio.to_thread` waits for its threads when the loop closes, and a thread inside torch.export or
a user's dataset cannot be interrupted: Ctrl-C would take seconds.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from p2ptrain.errors import Error
from p2ptrain.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")


class TaskScope:
    """`async with`: an error of ours in a task cancels the body and is raised at its end."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def spawn(
        self, coroutine: Coroutine[object, object, None], name: str
    ) -> asyncio.Task[None] | None:
        """Start a task, or nothing (None) once the scope ends."""
        if self._closed:
            coroutine.close()
            return None
        try:
            task = self._group.create_task(coroutine, name=name)
        except RuntimeError:  # another task has failed: the group is shutting down
            coroutine.close()
            return None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancel what still runs; raise what failed, alone where it is one error of ours.

        An error that only the body raised is passed on unchanged: it is not of these tasks.
        """
        self._closed = True
        for task in tuple(self._tasks):
            task.cancel()
        try:
            await self._group.__aexit__(error_type, error, trace)
        except BaseExceptionGroup as group:
            if all(failed is error for failed in group.exceptions):
                return
            single = _only_error(group)
            if single is None:
                raise
            raise single from None


async def to_the_end(write: Callable[[], T]) -> T:
    """What `write` returns or raises, in a thread.

    That cannot be stopped: who is cancelled waits for it, so that no two write the same file.
    """
    writing = asyncio.create_task(asyncio.to_thread(write))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await outlast(writing)
        raise


async def outlast(work: asyncio.Future[Any]) -> None:
    """Wait until it has ended, however often this is cancelled; what it raises is dropped.

    For callers that are cancelled already and end something that others rely on.
    """
    while not work.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([work])
    if not work.cancelled():
        work.exception()


def _only_error(group: BaseExceptionGroup[BaseException]) -> Error | None:
    """The one error of ours that a group stands for."""
    leaves = _leaves(group)
    return leaves[0] if len(leaves) == 1 and isinstance(leaves[0], Error) else None


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def _log_failure(work: str, error: BaseException) -> None:
    log.error("not_done", work=work, exc_info=error)


class TaskOwner:
    """See the module. No failure goes unheard, and none ends the others.

    Args:
        failed: called with the name and the error of a task that failed; else that is logged.
    """

    def __init__(self, failed: Callable[[str, BaseException], None] | None = None) -> None:
        self._failed = failed or _log_failure
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start `work`."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    @property
    def is_idle(self) -> bool:
        """Whether none runs."""
        return not self._tasks

    async def cancel(self) -> None:
        """End all that run now, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def done(self) -> None:
        """Wait until none runs, those included that others start meanwhile."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(task.get_name(), error)


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


async def set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until `event` is set, at most so long (None: for ever); whether it is."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


async def first_set(*events: asyncio.Event) -> None:
    """Return once one of `events` is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def first_error(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf of an exception group."""
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def end_program(
    process: asyncio.subprocess.Process,
    within_seconds: float,
    ended: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """Ask a program to leave, and kill it if it has not left in time.

    Args:
        ended: waits for its end; by default what it still says is thrown away.
    """
    wait = ended or process.communicate
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(within_seconds):
            await wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await wait()


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
