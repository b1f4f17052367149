"""One thread that runs torch, most urgent work first.

torch releases the GIL inside its operators, so the event loop stays responsive while this thread
computes; a second compute thread would only compete for the same cores (docs/internals/design.md,
decision 8). A device that holds two stages (`--private`) gives both to the same thread: of the
tasks that are ready a backward goes first, then the later stage's forward.

After each operator the thread needs the interpreter again, and a thread that computes in Python,
such as a search for a plan, releases it only after the switch interval. Python's 5 ms would slow a
step down many times, so ours is shorter.

In this thread numbers nearer to zero than the smallest normal one (1.2e-38 in float32) are zero.
Processors take a hundred cycles or so for each of them, and vanishing gradients are such numbers.
Losses stay plain torch's to the bit; weights differ by 1e-35 or so.

A device whose person wants some of it for themselves computes for a `share` of the time: after each
task the thread rests. Fewer threads would change the last bits of sums. The rest is part of the
task's time, as on a slower device, so that plans follow it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter, sleep
from typing import Any, TypeAlias, TypeVar

import torch

from p2ptrain.aio.tasks import for_futures, run_in_background
from p2ptrain.devices.interface import ComputeDevice, tells_of_failure
from p2ptrain.devices.processor import HOST
from p2ptrain.errors import AcceleratorFailed
from p2ptrain.logs import get_logger
from p2ptrain.process.cpu_share import CpuSpan, thread_clock
from p2ptrain.process.host_process import switch_often

log = get_logger(__name__)

T = TypeVar("T")

CLOSE_SECONDS = 1.0
"""A measurement may take seconds; nothing waits for its result any more."""

REST_STEP_SECONDS = 0.05
"""How soon a thread that rests sees that it need not."""

MOST_REST_SECONDS = 5.0
"""After one task: the others wait for its result."""

_Future: TypeAlias = tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]

_Setter: TypeAlias = Callable[[asyncio.Future[Any], Any], None]


def nothing_more() -> None:
    """After a task."""


def unheard(_device: ComputeDevice, _failed: AcceleratorFailed) -> None:
    """No one is to know."""


@dataclass(order=True)
class _Task:
    urgency: tuple[int, ...]
    sequence: int
    function: Callable[[], Any] = field(compare=False)
    future: asyncio.Future[Any] = field(compare=False)
    loop: asyncio.AbstractEventLoop = field(compare=False)


class ComputeThread:
    """A single worker thread with a priority queue, awaited from one event loop.

    The queue is bounded by its callers: each stage has at most one task in it at a time.

    Attributes:
        device: what it computes on; the processor, once an accelerator has failed, or for a model
            that it may not compute.
        finished: tasks so far.
        share: part of the time in which it computes, above 0; 1: it never rests.
    """

    def __init__(
        self,
        name: str = "p2ptrain-compute",
        after: Callable[[], None] = nothing_more,
        device: ComputeDevice = HOST,
        lost: Callable[[ComputeDevice, AcceleratorFailed], None] = unheard,
    ) -> None:
        """`after` is called in the thread when a task has ended, and may fail.

        Args:
            lost: called on the event loop with an accelerator that has failed.
        """
        self.device = self._best = device
        self._lost = lost
        self._after = after
        self._tasks: list[_Task] = []
        self._sequence = itertools.count()
        self._wake = threading.Condition()
        self._closed = False
        self.finished = 0
        self.share = 1.0
        self._is_busy = False
        self._flushing: list[_Future] = []  # who waits for the end of the task that runs now
        switch_often()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, urgency: tuple[int, ...], function: Callable[[], T]) -> T:
        """Run `function` in the thread; smaller `urgency` tuples go first, then the older.

        A cancelled caller leaves at once; a task that has begun is finished and its result dropped.
        Raises whatever `function` raises.
        """

        def rested() -> T:
            started = perf_counter()
            result = function()
            self._rest_after(started)
            return result

        return await self._enqueue(urgency, rested)

    async def _enqueue(self, urgency: tuple[int, ...], function: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        task = _Task(urgency, next(self._sequence), function, future, loop)
        with self._wake:
            if self._closed:
                raise RuntimeError("the compute thread is closed")
            heapq.heappush(self._tasks, task)
            self._wake.notify()
        return await future

    async def run_timed(
        self, urgency: tuple[int, ...], function: Callable[[], T]
    ) -> tuple[T, CpuSpan, float]:
        """As `run`, with the seconds that `function` took, and when it began (`perf_counter`).

        Waiting for its turn does not count.
        """

        def timed() -> tuple[T, CpuSpan, float]:
            thread_seconds = thread_clock()
            started, cpu = perf_counter(), thread_seconds()
            result = function()
            self._rest_after(started)
            return result, CpuSpan(perf_counter() - started, thread_seconds() - cpu), started

        return await self._enqueue(urgency, timed)

    def _rest_after(self, started: float) -> None:
        """A task that began then has ended; the rest does too once `share` is 1 or it closes."""
        if self.share >= 1:
            return
        ended = perf_counter()
        while (share := self.share) < 1 and not self._closed:
            rest_seconds = min((ended - started) * (1 / share - 1), MOST_REST_SECONDS)
            left = ended + rest_seconds - perf_counter()
            if left <= 0:
                return
            sleep(min(left, REST_STEP_SECONDS))

    @property
    def is_busy(self) -> bool:
        """Whether something runs, or is to."""
        return self._is_busy or bool(self._tasks)

    def give_up_device(self, failed: AcceleratorFailed) -> None:
        """The accelerator has failed: the processor computes for good. On the event loop."""
        if not self._best.is_host:
            device, self.device, self._best = self._best, HOST, HOST
            self._lost(device, failed)

    def use_processor(self, instead: bool) -> None:
        """For the tasks from now on: instead of the accelerator, or no more."""
        self.device = HOST if instead else self._best

    async def flush(self) -> None:
        """Wait until nothing runs that had begun before.

        A cancelled task runs until it has ended: only after a flush is its memory unused.
        """
        loop = asyncio.get_running_loop()
        with self._wake:
            if not self._is_busy:
                return
            ended: asyncio.Future[None] = loop.create_future()
            self._flushing.append((loop, ended))
        await ended

    async def close(self) -> None:
        """Drop what has not begun, and wait for what has, though not for long."""
        with self._wake:
            self._closed = True
            dropped, self._tasks = self._tasks, []
            self._wake.notify()
        for task in dropped:
            task.future.cancel()
        await run_in_background(partial(self._thread.join, CLOSE_SECONDS))

    def _run(self) -> None:
        prepared: ComputeDevice = HOST
        prepared.prepare_thread()  # an accelerator's host may make updates too
        while (task := self._next()) is not None:
            if self.device is not prepared:
                prepared = self.device
                prepared.prepare_thread()
            if not task.future.cancelled():
                self._execute(task)
            self.finished += 1
            del task  # its tensors must not outlive it while the thread waits
            try:
                self._after()
            except Exception as error:  # tasks wait for this thread
                log.warning("after_a_task", why=repr(error))

    def _next(self) -> _Task | None:
        with self._wake:
            for loop, ended in self._flushing:
                _answer(loop, _set_result, ended, None)
            self._flushing = []
            self._is_busy = False
            while not self._tasks and not self._closed:
                self._wake.wait()
            self._is_busy = bool(self._tasks)
            return heapq.heappop(self._tasks) if self._tasks else None

    def _execute(self, task: _Task) -> None:
        try:
            result = task.function()
        except BaseException as raised:  # handed to the one who awaits it
            error = _understood(raised, self.device)
            if isinstance(error, AcceleratorFailed) and not task.loop.is_closed():
                task.loop.call_soon_threadsafe(self.give_up_device, error)
            _answer(task.loop, _set_exception, task.future, error)
        else:
            _answer(task.loop, _set_result, task.future, result)


def _understood(error: BaseException, device: ComputeDevice) -> BaseException:
    """What torch raises where an operator finds that the card or its driver has failed, as ours."""
    return AcceleratorFailed.of(device.name, error) if tells_of_failure(error) else error


@contextmanager
def as_other_threads() -> Iterator[None]:
    """In a compute thread: numbers as near to zero as they are elsewhere."""
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(True)


def _answer(
    loop: asyncio.AbstractEventLoop, setter: _Setter, future: asyncio.Future[Any], value: Any
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(setter, future, value)


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(for_futures(error))
