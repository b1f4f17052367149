"""Signals that come while a command still loads count all the same."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2ptrain.cli import main, startup

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
