"""A pure function in a child process, so that training beside it does not slow down.

A thread that searches for seconds shares the interpreter's lock with the one that trains: torch
releases the lock in every operator and waits for it at the operator's end, so that rounds take
twice as long. A process shares no lock. A search that no device waits for also sleeps most of the
time: priority alone does not keep it from half of a device limited to part of a processor.

    this process                        the child
    [length][function, pickled] ──────► stdin:  called; ends when this side is closed
                  stdout ◄───────────── [result, exception, pickled]

Both are this program, so what is pickled comes from no other source. `child_process_main` is the
child's side. When no caller waits for the answer any more, the child is ended.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from p2ptrain.aio.tasks import run_in_background
from p2ptrain.logs import get_logger
from p2ptrain.process import child_process_main
from p2ptrain.process.child_process_main import LENGTH
from p2ptrain.process.memory_budget import available_memory_bytes

log = get_logger(__name__)

T = TypeVar("T")

ROOM_BYTES = 128 << 20
"""Less memory than this is left to training: a process with a planner takes 35 MB and more."""


class SearchPriority(IntEnum):
    """How much training may feel a search.

    Attributes:
        ALONE: no job trains here: a thread will do.
        PROMPT: the caller waits for the answer: an equal beside training.
        IDLE: no caller waits: it runs a tenth of the time.
    """

    ALONE = 0
    PROMPT = 1
    IDLE = 2


class ChildCancelled(Exception):
    """No caller waits for the child's answer any more; never leaves this file."""


class ChildProcess:
    """Calls functions in a process each, or here where no other process can be had."""

    def __init__(self, haste: SearchPriority) -> None:
        """`haste`: how much training may feel it."""
        self._haste = haste
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def __call__(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises.

        Args:
            function: can be pickled, as its result.

        Raises:
            GivenUp: `stop` was called.
        """
        if self._haste is SearchPriority.ALONE or not _can_be_had():
            return function()
        try:
            result, error = self._elsewhere(function)
        except (OSError, EOFError, pickle.UnpicklingError) as trouble:
            if self._is_stopped:
                raise ChildCancelled from None
            log.info("not_apart", why=str(trouble) or type(trouble).__name__)
            return function()
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        """End the process, if there is one. What is called here runs on."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()

    def _elsewhere(self, function: Callable[[], T]) -> tuple[T, Exception | None]:
        """What it returned, or raised.

        Raises OSError, EOFError, UnpicklingError: that process did not do it.
        """
        question = pickle.dumps(function)
        root = str(Path(__file__).parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        rest = ["rest"] * (self._haste is SearchPriority.IDLE)
        with subprocess.Popen(
            [sys.executable, "-P", "-m", child_process_main.__name__, *rest],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with self._lock:
                self._process = process
                if self._is_stopped:
                    process.kill()
            process.stdin.write(LENGTH.pack(len(question)) + question)
            process.stdin.flush()
            answer: tuple[T, Exception | None] = pickle.load(process.stdout)
            return answer


async def run_in_child(work: Callable[[ChildProcess], T], haste: SearchPriority) -> T:
    """What `work` returns or raises, off the event loop; what takes long it calls through
    `ChildProcess`.

    Where the caller is cancelled, the process ends with it.
    """
    process = ChildProcess(haste)
    try:
        return await run_in_background(lambda: work(process))
    finally:
        process.stop()


def _can_be_had() -> bool:
    """Whether there is a Python to start (in a frozen app there is the app), and memory."""
    is_python = Path(sys.executable or "").name.startswith(("python", "pypy"))
    frozen = getattr(sys, "frozen", False)
    return is_python and not frozen and available_memory_bytes() >= ROOM_BYTES
