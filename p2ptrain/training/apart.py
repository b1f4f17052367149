"""A pure function in a process of its own, so that training beside it does not feel it.

A thread that searches for seconds shares the interpreter's lock with the one that trains: torch
gives the lock away in every operator and waits for it at the operator's end, so that rounds take
twice as long. A process shares no lock. Where nobody waits for it, it also rests most of the time:
priorities alone do not keep it from taking half of a device that is limited to part of a processor.

    this process                        the other one
    [length][function, pickled] ──────► stdin:  called; ends when this side is closed
                  stdout ◄───────────── [result, exception, pickled]

Both are this program, so what is pickled comes from nobody else.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import p2ptrain
from p2ptrain.logs import get_logger
from p2ptrain.training.budget import available_memory_bytes

log = get_logger(__name__)

T = TypeVar("T")

ROOM_BYTES = 128 << 20
"""Less memory than this is left to training: a process with a planner takes 35 MB and more."""
_LENGTH = struct.Struct(">Q")


class Haste(IntEnum):
    """How much training may feel a search.

    Attributes:
        ALONE: nobody trains: a thread will do.
        PROMPT: somebody waits for what is found: an equal beside training.
        IDLE: nobody waits: it runs a tenth of the time.
    """

    ALONE = 0
    PROMPT = 1
    IDLE = 2


SLICE_SECONDS = 0.01
"""Of processor time, between two rests."""
NICENESS = 10
RESTS = 9
"""A rest is so many times as long as what it rests from."""


def run(function: Callable[[], T], haste: Haste) -> T:
    """What `function` returns or raises; here where no other process can be had.

    Args:
        function: can be pickled, as its result.
    """
    if haste is Haste.ALONE or not _can_be_had():
        return function()
    try:
        result, error = _elsewhere(function, haste)
    except (OSError, EOFError, pickle.UnpicklingError) as trouble:
        log.info("not_apart", why=str(trouble) or type(trouble).__name__)
        return function()
    if error is not None:
        raise error
    return result


def runner(haste: Haste) -> Callable[[Callable[[], T]], T]:
    """`run` with this haste."""
    return partial(run, haste=haste)


def _can_be_had() -> bool:
    """Whether there is a Python to start (in a frozen app there is the app), and memory."""
    is_python = Path(sys.executable or "").name.startswith(("python", "pypy"))
    frozen = getattr(sys, "frozen", False)
    return is_python and not frozen and available_memory_bytes() >= ROOM_BYTES


def _elsewhere(function: Callable[[], T], haste: Haste) -> tuple[T, Exception | None]:
    """What it returned, or raised.

    Raises OSError, EOFError, UnpicklingError: that process did not do it.
    """
    question = pickle.dumps((function, haste.value))
    root = str(Path(p2ptrain.__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(_LENGTH.pack(len(question)) + question)
        process.stdin.flush()
        answer: tuple[T, Exception | None] = pickle.load(process.stdout)
        return answer


def _answer(questions: BinaryIO, answers: BinaryIO) -> None:
    """The other process's part."""
    (length,) = _LENGTH.unpack(questions.read(_LENGTH.size))
    question = questions.read(length)
    threading.Thread(target=_end_with, args=(questions.fileno(),), daemon=True).start()
    function, haste = pickle.loads(question)
    if haste == Haste.IDLE:
        _rest_from_now_on()
    result, raised = None, None
    try:
        result = function()
    except Exception as error:  # raised again by who asked
        raised = error
    answers.write(pickle.dumps((result, raised)))
    answers.flush()


def _rest_from_now_on() -> None:
    """Run a tenth of the time, and after others."""
    if not hasattr(signal, "setitimer"):  # Windows
        return
    woke = time.monotonic()

    def rest(*_signal: object) -> None:
        nonlocal woke
        time.sleep(RESTS * (time.monotonic() - woke))
        woke = time.monotonic()

    os.nice(NICENESS)
    signal.signal(signal.SIGPROF, rest)
    signal.setitimer(signal.ITIMER_PROF, SLICE_SECONDS, SLICE_SECONDS)


def _end_with(questions: int) -> None:
    """Who asked is gone: nobody wants the answer. Past the buffer, whose lock the end needs."""
    while os.read(questions, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    own_stdout = sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever is printed is no answer
    _answer(sys.stdin.buffer, own_stdout)
