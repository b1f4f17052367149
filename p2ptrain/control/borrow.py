"""A node becomes this device's member: at once, or by borrowing the identity of a running `join`.

Either way the node holds the lock of the state folder until it ends, so that no other `join` starts
with its identity, even if the one that stepped aside is stopped meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.control.lease import RETRY_SECONDS, LeasedIdentity
from p2ptrain.control.member_lock import FolderBusy, FolderLock, NotRunning
from p2ptrain.errors import UserError
from p2ptrain.logs import get_logger

if TYPE_CHECKING:
    from p2ptrain.control.client import ControlClient

STARTING_SECONDS = 10.0
"""A `join` that has just been started holds the folder some time before it can be asked."""

_log = get_logger(__name__)


@contextlib.asynccontextmanager
async def own_lease(folder: Path, command: str) -> AsyncIterator[LeasedIdentity]:
    """This device's place, which is ours alone inside the context.

    Args:
        folder: the state folder.
        command: what has it then, for the message that another process shows.

    Raises:
        FolderBusy: another command has the state folder and cannot be asked.
        UserError: the member there does not step aside.
    """
    async with contextlib.AsyncExitStack() as stack:
        lock, place = FolderLock(folder, command), LeasedIdentity()
        try:
            stack.enter_context(lock)
        except FolderBusy as busy:
            client, place = await _borrow(folder, stack, busy)
            await _take_soon(lock)
            stack.callback(lock.release)
            stack.push_async_callback(_give_back, client, place)
        yield place


async def _borrow(
    folder: Path, stack: contextlib.AsyncExitStack, busy: FolderBusy
) -> tuple[ControlClient, LeasedIdentity]:
    """Ask the member with `folder` to step aside; while it is still starting, ask again."""
    from p2ptrain.control.client import ControlClient

    deadline = _now() + STARTING_SECONDS
    while True:
        try:
            client = await stack.enter_async_context(ControlClient(folder))
            return client, await client.step_aside()
        except NotRunning:
            # an app's node takes no questions, however long it runs
            if " app " in busy.holder or _now() > deadline:
                raise busy from None
        await asyncio.sleep(RETRY_SECONDS)  # another process's file: nothing to wait on


async def _take_soon(lock: FolderLock) -> None:
    """Take what a member lets go of that has stepped aside. Raises FolderBusy: it does not."""
    deadline = _now() + STARTING_SECONDS
    while True:
        try:
            return lock.take()
        except FolderBusy:
            if _now() > deadline:
                raise
        await asyncio.sleep(RETRY_SECONDS)  # another process's lock: nothing to wait on


async def _give_back(client: ControlClient, place: LeasedIdentity) -> None:
    """Say what is left of the pairing window, before the lock is free."""
    try:
        await client.give_back(place.window)
    except UserError as error:
        _log.info("the lender of this device's place is gone", why=str(error))


def _now() -> float:
    return asyncio.get_running_loop().time()
