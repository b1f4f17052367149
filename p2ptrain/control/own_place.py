"""How a node becomes this device's member: at once, or in the place of a running `join`.

The state folder is then locked by that `join`. Where it is stopped meanwhile, the node takes the
lock over, so that no other `join` begins with the identity that the node still has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from p2ptrain.control.lock import FolderBusy, FolderLock
from p2ptrain.control.place import Loan
from p2ptrain.control.record import NotRunning
from p2ptrain.errors import UserError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.window import Window

if TYPE_CHECKING:
    from p2ptrain.control.client import ControlClient

STARTING_SECONDS = 10.0
"""A `join` that has just been started holds the folder some time before it can be asked."""

_RETRY_SECONDS = 0.1

_log = get_logger(__name__)


class HasWindow(Protocol):
    """A member of whose pairing window the lender hears; `p2ptrain.Node` is one."""

    @property
    def window(self) -> Window | None:
        """The pairing window, while it is open."""


@dataclass(slots=True)
class OwnPlace:
    """This device's place in our hands.

    Attributes:
        name: what the member there was called; None where there was none.
        port: where it listened; None alike.
        window: the pairing window to start with, None where it is closed.
        member: who has the place now: what it leaves of the window goes back to the lender.
    """

    name: str | None = None
    port: int | None = None
    window: Window | None = None
    member: HasWindow | None = None

    @property
    def window_left(self) -> Window | None:
        """The window as it is now."""
        return self.window if self.member is None else self.member.window


@contextlib.asynccontextmanager
async def own_place(folder: Path, command: str) -> AsyncIterator[OwnPlace]:
    """This device's place, which is ours alone inside the context.

    Args:
        folder: the state folder.
        command: what has it then, for the message that another process shows.

    Raises:
        FolderBusy: another command has the state folder and cannot be asked.
        UserError: the member there does not step aside.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            stack.enter_context(FolderLock(folder, command))
        except FolderBusy as busy:
            loan = await _borrow(folder, command, stack, busy)
            own = OwnPlace(loan.place.name, loan.place.port, loan.place.window)
            try:
                yield own
            finally:
                loan.window = own.window_left
        else:
            yield OwnPlace()


async def _borrow(
    folder: Path, command: str, stack: contextlib.AsyncExitStack, busy: FolderBusy
) -> Loan:
    """Ask the member with `folder`; while it is still starting, ask again."""
    from p2ptrain.control.client import ControlClient

    deadline = asyncio.get_running_loop().time() + STARTING_SECONDS
    while True:
        try:
            client = await stack.enter_async_context(ControlClient(folder))
            loan = await stack.enter_async_context(client.step_aside())
        except NotRunning:
            # an app's node takes no questions, however long it runs
            if " app " in busy.holder or asyncio.get_running_loop().time() > deadline:
                raise busy from None
        else:
            await stack.enter_async_context(_folder_kept(client, folder, command))
            return loan
        await asyncio.sleep(_RETRY_SECONDS)  # another process's file: nothing to wait on


@contextlib.asynccontextmanager
async def _folder_kept(client: ControlClient, folder: Path, command: str) -> AsyncIterator[None]:
    """Keep `folder` locked, whether or not the member that lent its place still runs."""
    task = asyncio.create_task(_take_over(client, folder, command), name="take over the folder")
    try:
        yield
    finally:
        task.cancel()
        (error,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(error, Exception):
            _log.error("folder_not_taken_over", why=repr(error))


async def _take_over(client: ControlClient, folder: Path, command: str) -> None:
    """Lock `folder` once the member that lent its place is gone, until this is cancelled.

    It lets go at its very end, and the system starts it again only after that: we are first.
    """
    await client.abandoned()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + STARTING_SECONDS
    while True:
        try:
            with FolderLock(folder, command):
                await asyncio.Event().wait()
        except (UserError, OSError) as error:
            if not isinstance(error, FolderBusy) or loop.time() > deadline:
                _log.warning("folder_not_taken_over", why=str(error))
                return
        await asyncio.sleep(_RETRY_SECONDS)  # another process's lock: nothing to wait on
