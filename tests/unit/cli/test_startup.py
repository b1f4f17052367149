"""Signals that come while a command still loads count all the same."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from p2ptrain.cli import main, startup
from p2ptrain.cli.startup import SETTING, SPINS, VARIABLE, ensure_merging_heap, let_threads_sleep

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As in a terminal, even where the tests run in the background with Ctrl-C ignored."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    yield
    startup.release_signals()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_join_ends_in_order(
    number: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    startup.keep_signals()
    signal.raise_signal(number)
    assert main.main(["join", "--json", "--state-dir", str(tmp_path / "state")]) == 0
    out, err = capfd.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == [{"event": "stopped"}]
    assert err == ""
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("number", SIGNALS)
def test_other_commands_are_interrupted(
    number: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    startup.keep_signals()
    signal.raise_signal(number)
    assert main.main(["status", "--state-dir", str(tmp_path)]) == 130
    assert capfd.readouterr().err == "p2ptrain: interrupted\n"


def test_without_a_signal_everything_is_as_before(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    startup.keep_signals()
    assert [signal.getsignal(number) for number in SIGNALS] != before
    assert not startup.release_signals()
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    startup.keep_signals()
    signal.raise_signal(signal.SIGINT)
    assert not startup.release_signals()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


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
