"""What commands share that ask the running member: one question, one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from p2ptrain.errors import UserError

if TYPE_CHECKING:
    from p2ptrain.control.client import ControlClient
    from p2ptrain.page.state import PageState

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


async def state_of(client: ControlClient) -> PageState:
    """What the member's page would show. Raises UserError as `ask_member` does."""
    from p2ptrain.control.lease import OTHER_VERSION
    from p2ptrain.net.read_form import read_form
    from p2ptrain.page.state import PageState

    said = await client.state()
    try:
        return read_form(PageState, said, "the member's answer", UserError, extra=True)
    except UserError as error:
        raise UserError(OTHER_VERSION) from error
