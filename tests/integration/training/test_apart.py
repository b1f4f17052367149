"""A function in a process of its own answers as it would here, and ends with who asked."""

from __future__ import annotations

import asyncio
import operator
import os
import pickle
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from p2ptrain.process import child_process
from p2ptrain.process.child_process import SearchPriority
from p2ptrain.process.child_process_main import LENGTH, NICENESS, RESTS
from tests.integration.training.apart_work import computed, only_in, opened
from tests.unit.process.test_child_process import run

BESIDE = [SearchPriority.PROMPT, SearchPriority.IDLE]


@pytest.mark.parametrize("haste", BESIDE)
def test_another_process_answers(haste: SearchPriority) -> None:
    assert run(os.getpid, haste) != os.getpid()


def test_a_search_that_nobody_waits_for_yields_to_training() -> None:
    niceness = partial(os.nice, 0)
    assert run(niceness, SearchPriority.IDLE) == run(niceness, SearchPriority.PROMPT) + NICENESS


def test_and_rests_most_of_the_time() -> None:
    busy_seconds, seconds = run(computed, SearchPriority.IDLE)
    assert seconds > 0.7 * RESTS * busy_seconds


def test_what_is_raised_there_is_raised_here() -> None:
    with pytest.raises(OSError, match="No such file"):
        run(partial(os.stat, "/no/such/file"), SearchPriority.PROMPT)
    with pytest.raises(ZeroDivisionError):
        run(partial(operator.floordiv, 1, 0), SearchPriority.PROMPT)


def test_where_that_process_dies_it_is_called_here() -> None:
    assert run(partial(only_in, os.getpid()), SearchPriority.PROMPT) == os.getpid()


def test_it_ends_with_who_asked() -> None:
    question = pickle.dumps(partial(time.sleep, 600))
    with subprocess.Popen(
        [sys.executable, "-m", "p2ptrain.process.child_process_main"], stdin=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        process.stdin.write(LENGTH.pack(len(question)) + question)
        process.stdin.close()
        assert process.wait(timeout=30) == 1


@pytest.mark.parametrize("haste", BESIDE)
async def test_it_ends_with_the_wish_for_its_answer(tmp_path: Path, haste: SearchPriority) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    work = partial(opened, str(pipe))
    waiting = asyncio.create_task(child_process.run_in_child(lambda run: run(work), haste))
    with await asyncio.to_thread(pipe.open) as there:
        assert await asyncio.to_thread(there.read, 4) == "here"
        waiting.cancel()
        assert await asyncio.to_thread(there.read) == ""  # its end is closed: it is gone
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_what_is_found_in_time_comes_back() -> None:
    assert await child_process.run_in_child(
        lambda run: run(os.getpid) != os.getpid(), SearchPriority.PROMPT
    )
