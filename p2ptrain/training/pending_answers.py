"""Questions of other devices that are answered once something has been done: futures by number."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from p2ptrain.errors import PeerError
from p2ptrain.net.message import Message


class PendingAnswers:
    """See the module. Each question has a number of its own, by which it is answered."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Message]] = {}

    def number(self) -> int:
        """For one more question."""
        return next(self._numbers)

    @contextmanager
    def open(self, number: int) -> Iterator[asyncio.Future[Message]]:
        """Its answer, to be awaited; raises PeerError where it is refused."""
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        try:
            yield answer
        finally:
            del self._open[number]

    def give(self, number: int, message: Message) -> None:
        """The answer; nothing happens where whoever asked has gone."""
        answer = self._open.get(number)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def refuse(self, number: int, reason: str) -> None:
        """There will be none."""
        answer = self._open.get(number)
        if answer is not None and not answer.done():
            answer.set_exception(PeerError(reason))

    def refuse_all(self, reason: str) -> None:
        """The same for all that are open."""
        for number in list(self._open):
            self.refuse(number, reason)
