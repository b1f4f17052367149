"""Tasks that one object starts on the way, and ends when it ends.

Where the work fits between the beginning and the end of one `async with`, `scope.task_scope` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class OwnedTasks:
    """See the module. No failure goes unheard, and none ends the others.

    Args:
        failed: hears of a task that ended by an error: its name, the error.
    """

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        self._failed = failed
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
