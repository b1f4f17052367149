"""A command that computes keeps no freed memory in pieces, and its threads spin briefly."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import pytest

from p2ptrain.cli.startup import SETTING, SPINS, VARIABLE, ensure_merging_heap, let_threads_sleep


class Executed(list[tuple[str, list[str], Mapping[str, str]]]):
    """What would have been started, and returns, as the real one does not."""

    def __call__(self, path: str, command: list[str], environment: Mapping[str, str]) -> None:
        self.append((path, command, environment))


def test_it_is_the_same_command_line_of_the_same_python(monkeypatch: pytest.MonkeyPatch) -> None:
    started_as(monkeypatch, "python", "-X", "dev", "-m", "p2ptrain", "train", "x.py")
    executed = Executed()
    ensure_merging_heap(["train", "x.py"], {"HOME": "/h"}, executed, is_glibc=True)
    again = [sys.executable, "-X", "dev", "-m", "p2ptrain", "train", "x.py"]
    assert executed == [(sys.executable, again, {"HOME": "/h", VARIABLE: SETTING})]


def started_as(monkeypatch: pytest.MonkeyPatch, *words: str, program: str = "p2ptrain") -> None:
    monkeypatch.setattr(sys, "orig_argv", [*words])
    monkeypatch.setattr(sys, "argv", [program, *words[-2:]])


@pytest.mark.parametrize(
    ("command", "environment", "is_glibc"),
    [
        (["status"], {}, True),
        ([], {}, True),
        (["join"], {}, False),
        (["join"], {VARIABLE: SETTING}, True),
    ],
)
def test_it_goes_on_where_nothing_would_change(
    monkeypatch: pytest.MonkeyPatch,
    command: Sequence[str],
    environment: Mapping[str, str],
    is_glibc: bool,
) -> None:
    started_as(monkeypatch, "p2ptrain", *command)
    executed = Executed()
    ensure_merging_heap(command, environment, executed, is_glibc=is_glibc)
    assert executed == []


def test_a_program_that_would_not_do_the_same_again_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executed = Executed()
    started_as(monkeypatch, "python", "my_own.py")
    ensure_merging_heap(["join", "--debug"], {}, executed, is_glibc=True)
    started_as(monkeypatch, "python", "-", "join", "--debug", program="-")
    ensure_merging_heap(["join", "--debug"], {}, executed, is_glibc=True)
    assert executed == []


def test_where_it_cannot_be_started_again_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    started_as(monkeypatch, "p2ptrain", "join")

    def fails(path: str, command: list[str], environment: Mapping[str, str]) -> None:
        raise FileNotFoundError(path)

    ensure_merging_heap(["join"], {}, fails, is_glibc=True)


def test_threads_of_a_command_that_computes_spin_briefly() -> None:
    environment: dict[str, str] = {}
    let_threads_sleep(["status"], environment)
    assert environment == {}
    let_threads_sleep(["join", "--debug"], environment)
    assert int(environment[SPINS]) > 0


@pytest.mark.parametrize("said", [{SPINS: "5"}, {"OMP_WAIT_POLICY": "active"}])
def test_how_threads_wait_is_the_users_choice(said: dict[str, str]) -> None:
    environment = dict(said)
    let_threads_sleep(["train", "x.py"], environment)
    assert environment == said
