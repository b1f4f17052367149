"""What a command says, where that is not easy to say."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from p2ptrain.cli.output import Output
from p2ptrain.observe.events import MemberEvent, Step


class _Full(io.StringIO):
    """A file on a disk that is full at times."""

    full = True

    def flush(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("json", [False, True])
def test_events_go_on_without_a_disk_and_one_warning_says_so(
    json: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stream = _Full()
    output = Output(stream, json=json)
    for name in ("pi", "tv"):
        output.show(MemberEvent(name=name, state="alive"))
    assert caplog.text.count("No space left") == 1
    stream.full = False
    output.show(MemberEvent(name="laptop", state="alive"))
    assert "laptop" in stream.getvalue()
    stream.full = True
    output.show(MemberEvent(name="pi", state="dead"))
    assert caplog.text.count("No space left") == 2


def test_the_end_of_the_display_is_no_failure_either(caplog: pytest.LogCaptureFixture) -> None:
    stream = _Full()
    stream.full = False
    output = Output(stream, json=False)
    for step in (1, 2):  # the second one is held back
        output.show(Step(step=step, loss=0.5, samples_per_s=1.0, seconds=1.0))
    stream.full = True
    output.close()
    assert caplog.text.count("No space left") == 1


def test_an_answer_that_cannot_be_written_is_a_failure() -> None:
    with pytest.raises(OSError, match="No space left"):
        Output(_Full(), json=True).result({"name": "pi"}, "pi")


_ON_A_FULL_DISK = """
import sys
from p2ptrain.cli.main import main
sys.exit(main(["status", "--json", "--state-dir", sys.argv[1]]))
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_hides_no_error_behind_a_traceback(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", _ON_A_FULL_DISK, str(tmp_path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert "p2ptrain: error: p2ptrain is not running" in ended.stderr
    assert "Traceback" not in ended.stderr


_SCRIPT = """
import sys
from p2ptrain.cli.output import open_output
with open_output(json=True) as output:
    sys.__stdout__.write("from a script\\n")
    output.result({"name": "pi"}, "pi")
"""


_ENDS_LATE = """
import atexit, sys, types
sys.modules["torch"] = types.ModuleType("torch")  # is not torn down
atexit.register(print, "at the end")
def job(): raise ValueError("no data")
"""


def test_what_a_script_leaves_for_the_end_is_done_and_is_no_json_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_ENDS_LATE)
    ended = subprocess.run(
        [sys.executable, "-m", "p2ptrain", "train", str(script), "--local", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert [json.loads(line)["event"] for line in ended.stdout.splitlines()] == ["error"]
    assert ended.stderr.endswith("ValueError: no data\nat the end\n")


def test_what_a_script_writes_past_our_stdout_is_no_json_line_either() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
    )
    assert ended.stdout == '{"name": "pi"}\n'
    assert ended.stderr == "from a script\n"
