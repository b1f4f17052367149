"""Every end of a command has its exit code and its one line."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from p2ptrain.cli import main
from p2ptrain.cli.commands import member_commands
from p2ptrain.cli.usage import UsageError
from p2ptrain.errors import DeviceLost, DeviceUnusable, TrainingError

COMMANDS = (
    *("join", "train", "status", "invite", "devices", "remove"),
    *("profile", "plan", "simulate", "demo", "doctor"),
)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make `status` end with an error."""

    def fail_with(error: BaseException) -> None:
        def ask_member(*_: object) -> Any:
            raise error

        monkeypatch.setattr(member_commands, "ask_member", ask_member)

    return fail_with


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main([command, "--help"])
    assert end.value.code == 0
    assert f"example:\n  p2ptrain {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["join", "--memory", "2 elephants"],
        ["join", "--code", "123"],
        ["join", "--cod", "12345678"],
        ["train"],
        ["train", "x.py", "--planner", "tile"],
        ["train", "x.py", "--planner", "tiles", "--grid", "2"],
        ["train", "x.py", "--planner", "tiles", "--grid", "0x2"],
        ["train", "x.py", "--planner", "tiles", "--groups", "1-3"],
        ["train", "x.py", "--planner", "tiles", "--groups", "0-3,5-6"],
        ["train", "x.py", "--mode", "fast"],
        ["train", "x.py", "--mode", "async", "--versions", "3"],
        ["train", "x.py", "--steps", "0"],
        ["train", "x.py", "--out", "weights.bin"],
        ["join", "--threads", "0"],
        ["train", "x.py", "--device", "tpu"],
        ["join", "--device", "cuda:0,cuda:0"],
        ["profile", "x.py", "--out", "p.json", "--device", "cuda:0,cuda:1"],
        ["profile", "x.py", "--out", "p.json", "--threads", "3000000000"],
        ["train", "x.py", "--checkpoint", "~no-such-user/folder"],
        ["status", "--state-dir", "~no-such-user/folder"],
        ["train", "x.py", "-o", "hidden"],
        ["remove"],
    ],
)
def test_wrong_usage_is_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(argv)
    assert end.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["join", "--code", "123", "--json"], "argument --code: '123': a pairing code is 8 digits"),
        (["status", "--json", "extra"], "unrecognized arguments: extra"),
        (["top", "--jsn", "--json"], "unrecognized arguments: --jsn"),
        (["remove", "--json"], "the following arguments are required: NAME"),
    ],
)
def test_json_tells_wrong_usage_on_stdout_too(
    argv: list[str], what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(argv)
    assert end.value.code == 2
    said = capfd.readouterr()
    event = json.loads(said.out)
    assert event["event"] == "error"
    assert event["message"].startswith(what)
    assert said.err == (
        f"p2ptrain {argv[0]}: error: {event['message']} (p2ptrain {argv[0]} --help)\n"
    )


def test_a_planner_that_is_not_here_names_those_that_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main.main(["train", "x.py", "--planner", "fast"])
    assert "unknown planner 'fast': choose from auto, hybrid, pipedream" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [UsageError, DeviceUnusable])
def test_usage_found_late_is_exit_code_2(
    kind: type[Exception],
    failing: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing(kind("-o x: unknown"))
    assert main.main(["status"]) == 2
    assert capsys.readouterr().err == "p2ptrain: error: -o x: unknown\n"


@pytest.mark.parametrize(
    "error",
    [
        TrainingError("the loss is not finite\nafter step 3"),
        ExceptionGroup("tasks", [DeviceLost("pi is gone", name="pi"), ValueError("later")]),
        PermissionError(13, "Permission denied", "/root/x"),
    ],
)
def test_a_failure_is_one_line(
    error: Exception,
    failing: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing(error)
    assert main.main(["status"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("p2ptrain: error: ")
    assert captured.err.count("\n") == 1
    assert "internal" not in captured.err


def test_a_bug_says_how_to_see_more(
    failing: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    failing(KeyError("x"))
    assert main.main(["status"]) == 1
    err = capsys.readouterr().err
    where = r"internal error in cli/commands/member_commands\.py, line \d+"
    assert re.search(rf"{where}: KeyError: 'x' \(run again with --debug", err)
    assert "Traceback" not in err


def test_what_is_no_exception_is_one_line_too(
    failing: Callable[[BaseException], None], capfd: pytest.CaptureFixture[str]
) -> None:
    class Panic(BaseException):
        """As a library in Rust raises it."""

    failing(BaseExceptionGroup("tasks", [Panic("odd")]))
    assert main.main(["status", "--json"]) == 1
    captured = capfd.readouterr()
    assert "Panic: odd" in json.loads(captured.out)["message"]
    assert captured.err.count("\n") == 1


def test_a_descriptor_that_is_none_is_a_bug_of_ours(
    failing: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    failing(OSError(errno.EBADF, "Bad file descriptor"))
    assert main.main(["status"]) == 1
    assert "internal error in cli/commands/member_commands.py, line" in capsys.readouterr().err


def test_debug_shows_the_traceback(
    failing: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    failing(KeyError("x"))
    assert main.main(["status", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_130(
    failing: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    failing(KeyboardInterrupt())
    assert main.main(["status"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_json_tells_errors_on_stdout_too(
    failing: Callable[[BaseException], None], capfd: pytest.CaptureFixture[str]
) -> None:
    failing(TrainingError("the disk is full"))
    assert main.main(["status", "--json"]) == 1
    captured = capfd.readouterr()
    assert json.loads(captured.out) == {"event": "error", "message": "the disk is full"}
    assert "p2ptrain: error: the disk is full" in captured.err


def test_without_a_member_questions_end_in_one_line(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["status"], ["invite"], ["devices"], ["remove", "pi"]):
        assert main.main([*command, "--state-dir", f"{tmp_path}/none"]) == 1
        assert "Start it: p2ptrain join" in capsys.readouterr().err


HIDDEN = {
    "train": (
        *("--recovery", "--whole-copies", "--vertical-sync", "--aggregate", "--versions"),
        *("--no-stashing", "--repartition", "--replicate"),
    ),
    "plan": ("--overlap", "--schedule", "--straight"),
}


def _help(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main.main([command, option])
    assert end.value.code in (None, 0)
    return capsys.readouterr().out


@pytest.mark.parametrize("command", HIDDEN)
def test_help_shows_experimental_options_only_when_asked(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = _help(command, "--help", capsys)
    assert "experimental:" not in usual
    assert "--help-all" in usual
    assert not [option for option in HIDDEN[command] if option in usual]
    for everything in ("--help-all", "-hh"):
        shown = _help(command, everything, capsys)
        section = shown[shown.index("experimental:") :]
        assert not [option for option in HIDDEN[command] if f"\n  {option}" not in section]
