"""A pure function in a process of its own, so that training beside it does not feel it.

A thread that searches for seconds shares the interpreter's lock with the one that trains: torch
gives the lock away in every operator and waits for it at the operator's end, so that rounds take
twice as long. A process shares no lock. Where nobody waits for it, it also rests most of the time:
priorities alone do not keep it from taking half of a device that is limited to part of a processor.

    this process                        the other one
    [length][function, pickled] ──────► stdin:  called; ends when this side is closed
                  stdout ◄───────────── [result, exception, pickled]

Both are this program, so what is pickled comes from nobody else. The other one's part is
`apart_process`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TypeVar

import p2ptrain
from p2ptrain.logs import get_logger
from p2ptrain.training import apart_process
from p2ptrain.training.apart_process import LENGTH
from p2ptrain.training.budget import available_memory_bytes

log = get_logger(__name__)

T = TypeVar("T")

ROOM_BYTES = 128 << 20
"""Less memory than this is left to training: a process with a planner takes 35 MB and more."""


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
    question = pickle.dumps(function)
    root = str(Path(p2ptrain.__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", apart_process.__name__, *(["rest"] * (haste is Haste.IDLE))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(LENGTH.pack(len(question)) + question)
        process.stdin.flush()
        answer: tuple[T, Exception | None] = pickle.load(process.stdout)
        return answer
