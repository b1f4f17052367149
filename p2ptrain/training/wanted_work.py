"""What a device does for another one as long as that wants it: looks for plans, searches.

who asks                            who works
  |-- call ------------------------->|  `WantedWork.do`
  |-- not wanted any more ---------->|  `give_up`; so does its end
  |<-- that has been given up -------|
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, TypeVar

from p2ptrain.errors import PeerError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh
from p2ptrain.net.message import Message
from p2ptrain.training.waiting import is_gone, unless

log = get_logger(__name__)

T = TypeVar("T")

SAY_SECONDS = 1.0
"""A device that is stuck hears of it later, or that whoever asked is gone."""


class WantedWork:
    """Work of one kind, one piece for each key: the newest that was asked for.

    `what` is what people call one piece of it.
    """

    def __init__(self, mesh: Mesh, what: str) -> None:
        self._mesh = mesh
        self._what = what
        self._working: dict[Hashable, asyncio.Task[Any]] = {}

    async def do(self, key: Hashable, peer: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `work` returns or raises.

        Args:
            key: for `give_up`.
            peer: who wants it.

        Raises:
            PeerError: it was given up, or asked for once more, or `peer` is gone.
        """
        self.give_up(key)  # whoever asks again waits for the first answer no longer

        async def wanted() -> T | None:  # given up before it begins, there is no work to end
            return await unless(self._mesh, lambda: is_gone(self._mesh, peer), work())

        working = self._working[key] = asyncio.create_task(wanted(), name=self._what)
        try:
            await asyncio.wait([working])
        finally:
            working.cancel()
            if self._working.get(key) is working:
                del self._working[key]
        result: T | None = None if working.cancelled() else working.result()
        if result is None:
            raise PeerError(f"that {self._what} has been given up")
        return result

    def has(self, key: Hashable) -> bool:
        """Whether there is such work under way."""
        return key in self._working

    def give_up(self, key: Hashable) -> None:
        """It is not wanted any more, if it is under way."""
        working = self._working.get(key)
        if working is not None:
            working.cancel()


async def say_unwanted(mesh: Mesh, device: str, message: Message) -> None:
    """Tell whoever works that nobody wants it any more; one that is stuck is not waited for."""
    try:
        async with asyncio.timeout(SAY_SECONDS):
            await mesh.send(device, message)
    except (PeerError, TimeoutError) as error:
        why = str(error) or "it took too long"
        log.info("not_told_unwanted", device=device[:12], kind=message.kind, why=why)
