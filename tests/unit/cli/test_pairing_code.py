"""A pairing code from wherever it is kept, and never in the list of processes."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from p2ptrain.cli import main, pairing_code
from p2ptrain.cli.usage import UsageError
from tests.unit.cli.conftest import FakeNode


def started_again(
    monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[list[str], str | None] | None:
    """The arguments and the code that the process is started with again, if it is."""
    calls: list[tuple[list[str], str | None]] = []

    def execute(program: str, argv: list[str], environment: Mapping[str, str]) -> None:
        assert (program, environment["HOME"]) == (sys.executable, "/here")
        calls.append((argv, environment.get(pairing_code.VARIABLE)))

    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "p2ptrain", *arguments])
    monkeypatch.setattr(sys, "argv", ["/lib/p2ptrain/__main__.py", *arguments])
    pairing_code.take_out_of_sight(arguments, {"HOME": "/here"}, execute)
    return calls[0] if calls else None


@pytest.mark.parametrize(
    "given",
    [["--code", "1234-5678"], ["--code=12345678"], ["--code", "1234 5678"]],
    ids=lambda given: given[0],
)
def test_a_code_is_taken_out_of_the_arguments(
    monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    again = started_again(monkeypatch, "join", "--name", "pi", *given, "--json")
    whole = [sys.executable, "-m", "p2ptrain", "join", "--name", "pi", "--json"]
    assert again == (whole, "12345678")


@pytest.mark.parametrize(
    "arguments",
    [
        ["join"],
        ["join", "--code", "-"],
        ["join", "--code", "none at all"],
        ["join", "--code"],
        ["join", "--code-file", "code.txt"],
        ["join", "--code", "12345678", "--code-file", "code.txt"],
        ["join", "--code", "12345678", "--code", "87654321"],
    ],
    ids=" ".join,
)
def test_where_there_is_no_code_or_several_the_parser_has_its_say(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    assert started_again(monkeypatch, *arguments) is None


def test_the_code_may_stand_in_a_file_or_the_environment_or_be_typed(tmp_path: Path) -> None:
    file = tmp_path / "code"
    file.write_text(" 1234-5678\n")
    assert pairing_code.chosen(None, file, {}) == "12345678"
    environment = {pairing_code.VARIABLE: "8765 4321"}
    assert pairing_code.chosen(None, None, environment) == "87654321"
    assert environment == {}  # what this process starts does not inherit it
    assert pairing_code.chosen("-", None, {}, lambda: "1234 5678\n") == "12345678"
    assert pairing_code.chosen(None, None, {}) is None
    assert pairing_code.chosen(None, None, {pairing_code.VARIABLE: ""}) is None


def test_what_was_said_last_counts(tmp_path: Path) -> None:
    inherited = {pairing_code.VARIABLE: "11111111"}
    assert pairing_code.chosen("22222222", None, dict(inherited)) == "22222222"
    file = tmp_path / "code"
    file.write_text("33333333")
    assert pairing_code.chosen(None, file, dict(inherited)) == "33333333"


def test_what_is_no_code_is_wrong_usage_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "code"
    file.write_text("my secret")
    with pytest.raises(UsageError, match=r"--code-file .*code: a pairing code is 8") as told:
        pairing_code.chosen(None, file, {})
    assert "secret" not in str(told.value)
    with pytest.raises(UsageError, match=r"\$P2PTRAIN_CODE"):
        pairing_code.chosen(None, None, {pairing_code.VARIABLE: "123"})
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        pairing_code.chosen(None, tmp_path / "none", {})
    with pytest.raises(UsageError, match="what was typed"):
        pairing_code.chosen("-", None, {}, lambda: "")


def test_a_code_that_is_asked_for_reaches_the_node(
    node: type[FakeNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("1234 5678\n"))
    node.on_ready = lambda _: signal.raise_signal(signal.SIGTERM)
    assert main.main(["join", "--code", "-", "--state-dir", str(tmp_path)]) == 0
    assert node.made[0].options["code"] == "12345678"


def test_two_ways_at_once_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["join", "--code", "12345678", "--code-file", "x"])
    assert end.value.code == 2
    assert "not allowed with" in capsys.readouterr().err
