"""Loading ahead of training, by a bounded number of batches, in one thread.

The user's dataset runs in a thread of its own so that decoding an image stops neither the event
loop nor the compute thread. One thread, because datasets need not be thread-safe.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from p2ptrain.logs import get_logger
from p2ptrain.training.background import in_background

log = get_logger(__name__)

K = TypeVar("K")
V = TypeVar("V")

CLOSE_SECONDS = 1.0


class Prefetcher(Generic[K, V]):
    """Calls `load(key)` for each key in order, at most `ahead` results before they are taken.

    Use it as an async context manager and an async iterator, from one task. Leaving the context
    drops what was loaded and waits for the call that is running, if any, though not for long: a
    dataset may hang on a network drive.
    """

    def __init__(self, load: Callable[[K], V], keys: Iterable[K], *, ahead: int) -> None:
        if ahead < 1:
            raise ValueError(f"ahead must be at least 1, not {ahead}")
        self._load = load
        self._ahead = ahead
        self._keys: Iterator[K] = iter(keys)
        self._waiting: deque[Future[V]] = deque()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="p2ptrain-data")

    async def __aenter__(self) -> Prefetcher[K, V]:
        self._fill()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._drop()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await in_background(self._executor.shutdown)
        except TimeoutError:
            log.info("still_loading", after_seconds=CLOSE_SECONDS)

    def __aiter__(self) -> Prefetcher[K, V]:
        return self

    async def __anext__(self) -> V:
        """The next result, in the order of the keys; cancelling the wait loses none.

        Raises:
            ScriptError: what `load` raised for this key.
        """
        self._fill()
        if not self._waiting:
            raise StopAsyncIteration
        value = await asyncio.shield(asyncio.wrap_future(self._waiting[0]))
        self._waiting.popleft()
        self._fill()
        return value

    def _fill(self) -> None:
        while len(self._waiting) < self._ahead:
            try:
                key = next(self._keys)
            except StopIteration:
                return
            self._waiting.append(self._executor.submit(self._load, key))

    def _drop(self) -> None:
        while self._waiting:
            self._waiting.popleft().cancel()
