"""Writes what this device remembers of others beside the event loop, in a thread.

Links come up often, a device may change its name as often as it likes, and a disk may be slow or
full. So what changes meanwhile is written together, at most once in a while. What cannot be written
counts until this process ends, costs no membership, and is warned of once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from p2ptrain.errors import UserError
from p2ptrain.mesh.notices import Notices
from p2ptrain.mesh.tasks import TaskScope, to_the_end

PAUSE_SECONDS = 5.0
"""Between two writes. Shorter: a liar keeps the disk busy; longer: more is lost by a power
failure."""


class DiskWriter:
    """One for all files of a mesh."""

    def __init__(
        self,
        tasks: TaskScope,
        notices: Notices,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._tasks = tasks
        self._notices = notices
        self._sleep = sleep
        self._due: dict[str, Callable[[], None]] = {}
        self._writing: asyncio.Task[None] | None = None

    def soon(self, write: Callable[[], None], loss: str) -> None:
        """Call `write` in a thread soon; of those with one `loss` only the last.

        Args:
            write: may raise UserError.
            loss: what people are told if it does.
        """
        self._due[loss] = write
        if self._writing is None or self._writing.done():
            self._writing = self._tasks.spawn(self._keep_writing(), "write to disk")

    async def close(self) -> None:
        """Write what is not on disk yet."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])
        await self._write_all()

    async def _keep_writing(self) -> None:
        while self._due:
            await self._write_all()
            await self._sleep(PAUSE_SECONDS)

    async def _write_all(self) -> None:
        while self._due:
            loss, write = self._due.popitem()
            try:  # the next process may write the same file: this thread must be done
                await to_the_end(write)
            except UserError as error:
                self._notices.warn(f"{error}: {loss}")
