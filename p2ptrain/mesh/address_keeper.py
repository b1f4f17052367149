"""Keeps where others proved themselves for the next start: only hints, so nothing depends on it.

Links come up often and a disk may take long or be full, so the file is written in a thread, at most
one at a time; what comes up meanwhile is written together. What cannot be written is told once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from p2ptrain.errors import UserError
from p2ptrain.mesh.addresses import Address
from p2ptrain.mesh.device_file import DeviceFile
from p2ptrain.mesh.tasks import TaskScope, to_the_end

Addresses = Mapping[str, list[Address]]
"""By device id."""


class AddressKeeper:
    """See the module.

    Args:
        file: written to.
        now: the addresses at this moment.
        warn: tells people, once however often it happens.
    """

    def __init__(
        self,
        file: DeviceFile,
        now: Callable[[], Addresses],
        tasks: TaskScope,
        warn: Callable[[str], None],
    ) -> None:
        self._file = file
        self._now = now
        self._tasks = tasks
        self._warn = warn
        self._kept: Addresses | None = None
        self._wanted = False
        self._task: asyncio.Task[None] | None = None

    def remember(self) -> None:
        """Write the addresses soon, unless they are on disk already; never waits."""
        self._wanted = True
        if self._task is None or self._task.done():
            self._task = self._tasks.spawn(self._write(), "write addresses")

    async def close(self) -> None:
        """Wait for what is being written."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _write(self) -> None:
        while self._wanted:
            self._wanted = False
            addresses = self._now()
            if addresses != self._kept:
                await self._save(addresses)

    async def _save(self, addresses: Addresses) -> None:
        try:  # the next process may write the same file: this thread must be done
            await to_the_end(partial(self._file.save_addresses, addresses))
        except UserError as error:
            self._warn(f"{error}: after its next start this device may take longer to find others")
        else:
            self._kept = addresses
