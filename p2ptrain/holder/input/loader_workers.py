"""Processes that read a loader's batches: started once, not for every epoch.

torch starts new ones for every epoch, and what a sample draws hangs on that: each begins with seeds
of that epoch and with the data set as the loader's process has it. So at the beginning of an epoch
these take the same seeds, call the loader's `worker_init_fn` again, and make sure that their data
set is what it was (`KeptState`). Where it is not, or cannot be known, new ones are started for
every epoch, as torch does; batches that were read are thrown away and read again.

The processes are those of a `DataLoader` that never ends. Its items are tasks:

    epoch 0: indices 0, 1, 2, ...    idle, idle    epoch 1: indices 0, 1, ...

Task i goes to worker i modulo their number, in torch as here, so an epoch begins at a multiple.
"""

from __future__ import annotations

import os
import random
import socket
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from threading import Event
from typing import Any

import numpy
import torch
from torch.utils import data as torch_data
from torch.utils.data import _utils as torch_parts

from p2ptrain.holder.input.kept_state import KeptState

Drawing = Callable[[], AbstractContextManager[Any]]
"""Held while the user's sampler runs, which may draw random numbers."""


@dataclass(frozen=True, slots=True)
class ReadTask:
    """What one worker does next.

    Attributes:
        epoch: number of the pass; 0 = nothing is read.
        seed: of the pass; each worker adds its number.
        indices: as the loader's sampler gives them.
    """

    epoch: int
    seed: int = 0
    indices: Any = None


_IDLE = ReadTask(0)


class _IsOver:
    """Nothing more comes from this worker."""


class _HasChanged(Exception):
    """A worker's data set is not what it was when the worker began."""


class _ReadTasks:
    """What a worker has: the loader's data set and what it does with it."""

    def __init__(self, loader: torch_data.DataLoader[Any], *, stays: bool) -> None:
        """`stays`: there may be another pass after the first."""
        self._stays = stays
        self._dataset = loader.dataset
        self._collate = loader.collate_fn
        self._starts = loader.worker_init_fn
        self._kind = loader._dataset_kind
        self._makes_batches = loader._auto_collation
        self._drop_last = loader.drop_last
        self._epoch = 0
        self._is_over = False
        self._fetcher: Any = None
        self._first: KeptState | None = None

    def __getitem__(self, task: ReadTask) -> Any:
        """A batch; None where nothing is to be read."""
        if not task.epoch:
            return None
        if task.epoch != self._epoch:
            self._begin(task)
        if self._is_over:
            return _IsOver()
        try:
            return self._fetcher.fetch(task.indices)
        except StopIteration:
            if self._kind != torch_data._DatasetKind.Iterable:
                raise
            self._is_over = True
            return _IsOver()

    def _begin(self, task: ReadTask) -> None:
        """As in torch's own `_worker_loop`, where a process begins."""
        self._check()
        self._epoch, self._is_over = task.epoch, False
        worker = torch_data.get_worker_info()
        assert worker is not None
        seed = task.seed + worker.id
        random.seed(seed)
        torch.manual_seed(seed)
        numpy.random.seed(
            torch_parts.worker._generate_state(task.seed, worker.id)  # type: ignore[no-untyped-call]
        )
        torch_parts.worker._worker_info = torch_parts.worker.WorkerInfo(
            id=worker.id, num_workers=worker.num_workers, seed=seed, dataset=self._dataset
        )
        if self._starts is not None:
            self._starts(worker.id)
        if self._first is None and self._stays:
            self._first = KeptState(self._dataset, self._collate, self._starts)
        else:
            self._check()
        self._fetcher = torch_data._DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
            self._kind, self._dataset, self._makes_batches, self._collate, self._drop_last
        )

    def _check(self) -> None:
        if self._first is not None and not self._first.is_unchanged():
            raise _HasChanged


class _Sending:
    """Tasks for the workers, in the order in which they are sent and answered."""

    def __init__(self) -> None:
        self.under_way: deque[ReadTask] = deque()
        self.sent = 0
        self._again: deque[ReadTask] = deque()
        self._tasks: Iterator[ReadTask] = iter(())
        self._drawing: Drawing = nullcontext
        self._first: list[ReadTask] | None = None
        self._error: BaseException | None = None
        self.has_all = True

    def begin(self, tasks: Iterator[ReadTask], drawing: Drawing) -> None:
        """A pass: these come next."""
        self._tasks, self._drawing = tasks, drawing
        self._first, self._error, self.has_all = [], None, False

    def end(self) -> None:
        """Nothing more of the pass is sent."""
        self._tasks, self.has_all = iter(()), True

    def begin_again(self) -> None:
        """The workers are new: what was sent of the pass is sent to them as it was."""
        self._again = deque(self._first or ())
        self.start()

    def start(self) -> None:
        """Of new workers, that have nothing yet."""
        self.under_way.clear()
        self.sent = 0

    def are_at_work(self) -> None:
        """All workers have begun with the pass: nothing is sent again."""
        self._first = None

    def check(self) -> None:
        """Raises what the user's sampler has raised."""
        if self._error is not None:
            raise self._error

    def __iter__(self) -> Iterator[ReadTask]:
        while True:
            task = self._again.popleft() if self._again else self._next()
            self.sent += 1
            self.under_way.append(task)
            yield task

    def _next(self) -> ReadTask:
        try:
            with self._drawing():
                task = next(self._tasks, None)
        except Exception as error:  # torch's iterator would be over: it is raised in its turn
            self._error, task = error, None
        if task is None:
            self.end()
            return _IDLE
        if self._first is not None:
            self._first.append(task)
        return task


class LoaderWorkers:
    """The processes of one loader. One thread uses it at a time, `close` aside."""

    def __init__(self, loader: torch_data.DataLoader[Any]) -> None:
        self._loader = loader
        self._pass = 0
        self._is_stateful = False
        self._began_with: KeptState | None = None  # in this process, when they were started
        self._answers: Any = None  # torch's iterator over those of the workers
        self._sending = _Sending()

    @classmethod
    def of(cls, loader: Any) -> LoaderWorkers | None:
        """None where the loader has none, keeps them itself, or is read in a way of its own."""
        if not isinstance(loader, torch_data.DataLoader) or not loader.num_workers:
            return None
        made, torchs = type(loader), torch_data.DataLoader
        is_own = made.__iter__ is torchs.__iter__ and made._get_iterator is torchs._get_iterator
        pipes = isinstance(loader.dataset, torch_data.IterDataPipe | torch_data.MapDataPipe)
        if not is_own or pipes or loader.persistent_workers or not loader.in_order:
            return None
        return cls(loader)

    def epoch(self, drawing: Drawing) -> Iterator[Any]:
        """The batches of one pass, as torch's `iter(loader)` gives them.

        Args:
            drawing: has torch's generator as it is in the pass.
        """
        self._pass += 1
        number, loader, sending = self._pass, self._loader, self._sending
        with drawing():  # in torch's order
            sampler = iter(loader._index_sampler)
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
        sending.end()
        self._make_ready()
        sending.begin((ReadTask(number, seed, indices) for indices in sampler), drawing)
        answered = known = 0
        ended: set[int] = set()
        while len(ended) < loader.num_workers:
            try:
                task, answer = self._next()
            except _HasChanged:
                self._is_stateful = True
                self._stop()
                sending.begin_again()
                answered, ended = 0, set()
                continue
            if number != self._pass:
                return
            if task.epoch == number:
                if isinstance(answer, _IsOver):
                    ended.add(answered % loader.num_workers)
                elif answered >= known:
                    yield answer
                answered += 1
                known = max(known, answered)
                if answered == loader.num_workers:
                    sending.are_at_work()
            if sending.has_all and all(one.epoch != number for one in sending.under_way):
                sending.check()
                return
        sending.end()

    def close(self) -> None:
        """End them, what they read included."""
        self._pass += 1
        self._stop()

    def _make_ready(self) -> None:
        """The next task is the first of a pass."""
        if self._is_stateful or self._began_with is None or not self._began_with.is_unchanged():
            self._stop()
        while self._answers is not None and self._sending.sent % self._loader.num_workers:
            with suppress(Exception):  # of a pass that was given up
                self._next()

    def _next(self) -> tuple[ReadTask, Any]:
        """The answer to the oldest task; one more is sent."""
        sending = self._sending
        try:
            if self._answers is None:
                self._start()
            answer = next(self._answers)
        except _HasChanged:
            sending.under_way.popleft()
            raise
        except BaseException:
            self._stop()
            raise
        return sending.under_way.popleft(), answer

    def _start(self) -> None:
        loader = self._loader
        kept = loader.dataset, loader.collate_fn, loader.worker_init_fn
        self._began_with = None if self._is_stateful else KeptState(*kept)
        self._sending.start()
        reader: Any = _ReadTasks(loader, stays=not self._is_stateful)
        tasks = torch_data.DataLoader[Any](
            reader,
            batch_size=None,
            sampler=self._sending,
            num_workers=loader.num_workers,
            collate_fn=_as_it_is,
            worker_init_fn=close_network_sockets,
            timeout=loader.timeout,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            generator=torch.Generator(),
        )
        self._answers = iter(tasks)

    def _stop(self) -> None:
        answers, self._answers = self._answers, None
        if answers is not None:
            end_workers(answers)


def end_workers(iterator: Any) -> None:
    """End the processes of torch's iterator now, though one may be reading."""
    processes = getattr(iterator, "_workers", ())
    if not hasattr(iterator, "_shutdown_workers"):
        return
    if getattr(iterator, "_worker_pids_set", False):  # else their end is an error to torch
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    for process in processes:
        process.terminate()
    iterator._workers_done_event = Event()  # one that is killed may hold the lock of theirs
    iterator._shutdown_workers()


def _as_it_is(answer: Any) -> Any:
    return answer


def close_network_sockets(_worker: int = 0) -> None:
    """All of this process's own, where the system lists them.

    Else those that a worker inherits stay open after this process has died, and its port taken.
    """
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return
    for number in numbers:
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            found = socket.socket(fileno=number)
            if found.family in (socket.AF_INET, socket.AF_INET6):
                found.close()
            else:
                found.detach()
