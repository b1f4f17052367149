"""What `status`, `invite`, `devices` and `remove` share: one question to the running member."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from p2ptrain.control.client import ControlClient

T = TypeVar("T")


def ask_member(folder: Path, question: Callable[[ControlClient], Awaitable[T]]) -> T:
    """The answer of the member that runs with the state folder `folder`.

    Raises:
        NotRunning: there is none.
        UserError: what the member says.
    """

    async def conversation() -> T:
        from p2ptrain.control.client import ControlClient

        async with ControlClient(folder) as client:
            return await question(client)

    return asyncio.run(conversation())
