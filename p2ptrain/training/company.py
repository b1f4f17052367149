"""A device that has measured a model works on until all have.

Some devices share something: a machine, its caches, its memory. Who measures while the others rest
already finds itself faster than it will be in training, when nobody rests; on two cores that five
emulated devices share, those that finish last by a sixth, and plans then gave them too much. Where
devices share nothing, nothing is lost: the coordinator waits for the last one anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any

from p2ptrain.logs import get_logger
from p2ptrain.training.compute import ComputeThread
from p2ptrain.training.owned_tasks import OwnedTasks
from p2ptrain.training.profiling import MOST_SECONDS

log = get_logger(__name__)

_URGENCY = (9,)
"""After all else that this device may have to compute."""


class Company:
    """One a device."""

    def __init__(self, compute: ComputeThread) -> None:
        self._compute = compute
        self._tasks = OwnedTasks(_failed)
        self._task: asyncio.Task[None] | None = None

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` until `end`: see `steps`, or it runs in a process that ends when cancelled."""
        self.end()
        self._task = self._tasks.spawn(work, "company")

    def end(self) -> None:
        """All have measured."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        """End, and wait until that is so."""
        await self._tasks.cancel()

    async def steps(self, steps: Iterator[None]) -> None:
        """Take them, which have no end, in this process, while others may still measure."""
        loop = asyncio.get_running_loop()
        until = loop.time() + MOST_SECONDS
        while loop.time() < until:
            await self._compute.run(_URGENCY, partial(next, steps))


def _failed(name: str, error: BaseException) -> None:
    log.info("company_left", task=name, why=str(error) or type(error).__name__)
