"""What processes of commands write at their end, and where the disk is full."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_what_is_shown_goes_to_a_file_that_stays_small(tmp_path: Path) -> None:
    log = tmp_path / "join.log"
    program = (
        "import sys, os; from pathlib import Path; from p2ptrain.cli.output import write_to;"
        "print('before'); write_to(Path(sys.argv[1]), 100);"
        "print('shown'); sys.stdout.flush(); os.write(2, b'a warning\\n')"
    )
    for content in ("x" * 101, "kept\n"):
        log.write_text(content)
        command = [sys.executable, "-c", program, str(log)]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        assert (ended.stdout, ended.stderr) == ("before\n", "")
        kept = content if len(content) < 100 else ""
        assert log.read_text() == f"{kept}shown\na warning\n"
