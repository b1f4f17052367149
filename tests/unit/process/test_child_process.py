"""A function is called here where no process of its own can be had, or need be."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest

from p2ptrain.errors import PlanError
from p2ptrain.process import child_process
from p2ptrain.process.child_process import ChildCancelled, ChildProcess, SearchPriority

T = TypeVar("T")


def run(function: Callable[[], T], haste: SearchPriority) -> T:
    return ChildProcess(haste)(function)


def test_where_no_job_trains_it_stays_here() -> None:
    assert run(os.getpid, SearchPriority.ALONE) == os.getpid()


def test_errors_of_planners_keep_their_kind_and_their_text() -> None:
    told = pickle.loads(pickle.dumps(PlanError("1024 bytes are missing")))
    assert (type(told), str(told)) == (PlanError, "1024 bytes are missing")


def test_where_that_process_cannot_be_started_it_is_called_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    assert run(os.getpid, SearchPriority.PROMPT) == os.getpid()


@pytest.mark.parametrize("executable", ["/opt/my-app", ""])
def test_an_app_that_embeds_python_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    assert run(os.getpid, SearchPriority.PROMPT) == os.getpid()


def test_with_little_memory_it_stays_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        child_process, "available_memory_bytes", lambda: child_process.ROOM_BYTES - 1
    )
    assert run(os.getpid, SearchPriority.PROMPT) == os.getpid()


def test_and_what_was_stopped_before_is_not_called_here_instead() -> None:
    stopped = ChildProcess(SearchPriority.PROMPT)
    stopped.stop()
    with pytest.raises(ChildCancelled):
        stopped(partial(time.sleep, 600))
