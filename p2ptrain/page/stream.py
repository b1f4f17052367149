"""One state, many browsers: each gets all of it first, then what changes.

A browser that does not read is let go of once its queue is full; it comes back by itself and gets
the whole state again. So a slow one costs memory for a few changes, and no other one anything.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from p2ptrain.page.state import Sections, changes

QUEUE_LIMIT = 16

BROWSERS_LIMIT = 32


class TooManyBrowsers(Exception):
    """So many look already."""


class Watcher:
    """One browser: what it has not been sent yet."""

    def __init__(self, limit: int = QUEUE_LIMIT) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(limit + 1)
        self._limit = limit
        self.is_gone = False

    def put(self, frame: bytes) -> None:
        """Take something to send; one that is too far behind gets nothing any more."""
        if self.is_gone:
            return
        if self._queue.qsize() >= self._limit:
            self.close()
        else:
            self._queue.put_nowait(frame)

    def close(self) -> None:
        """End it, whatever still waits."""
        self.is_gone = True
        with suppress(asyncio.QueueEmpty):
            while True:
                self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def frames(self, quiet_seconds: float) -> AsyncIterator[bytes]:
        """What to send; a sign of life where nothing came for so long, until it is closed."""
        while True:
            try:
                async with asyncio.timeout(quiet_seconds):
                    frame = await self._queue.get()
            except TimeoutError:
                frame = b"event: alive\ndata: \n\n"
            if frame is None:
                return
            yield frame


class StateStream:
    """The states in order, for any number of browsers that see the same.

    Args:
        epoch: makes this stream's ids differ from those of an earlier process.
    """

    def __init__(self, epoch: str, browsers: int = BROWSERS_LIMIT) -> None:
        self._epoch = epoch
        self._browsers = browsers
        self._number = 0
        self._sections: Sections | None = None
        self._watchers: set[Watcher] = set()

    def __len__(self) -> int:
        """How many look."""
        return len(self._watchers)

    def publish(self, sections: Sections) -> None:
        """A new state. Nothing is sent where it is the one before."""
        before, self._sections = self._sections, sections
        if before is None:
            self._number += 1
            self._send(self._frame("state", sections))
        elif changed := changes(before, sections):
            self._number += 1
            self._send(self._frame("change", changed))

    def join(self, limit: int = QUEUE_LIMIT) -> Watcher:
        """One more browser; the whole state is its first frame. Raises TooManyBrowsers."""
        if len(self._watchers) >= self._browsers:
            raise TooManyBrowsers
        watcher = Watcher(limit)
        if self._sections is not None:
            watcher.put(self._frame("state", self._sections))
        self._watchers.add(watcher)
        return watcher

    def part(self, watcher: Watcher) -> None:
        """It is gone."""
        watcher.close()
        self._watchers.discard(watcher)
        if not self._watchers:
            self._sections = None  # old when the next one comes

    def close(self) -> None:
        """End all."""
        for watcher in self._watchers:
            watcher.close()

    def _send(self, frame: bytes) -> None:
        for watcher in self._watchers:
            watcher.put(frame)

    def _frame(self, kind: str, body: Sections) -> bytes:
        return (
            f"event: {kind}\nid: {self._epoch}-{self._number}\ndata: {as_json(body)}\n\n".encode()
        )


def as_json(body: Any) -> str:
    """On one line; a state has no NaN, and surrogates cannot be sent."""
    return json.dumps(body, allow_nan=False, separators=(",", ":"))
