"""A command that was started without stdout or stderr runs as if nobody read them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_CLOSES = (
    "import os, sys; [os.close(int(n)) for n in {closed!r}]; os.execv(sys.argv[1], sys.argv[1:])"
)


def _started_without(closed: str, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "p2ptrain", *argv]
    return subprocess.run(
        [sys.executable, "-c", _CLOSES.format(closed=closed), *command],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_without_stdout_the_error_still_stands_on_stderr(
    json_too: list[str], tmp_path: Path
) -> None:
    done = _started_without("01", "status", "--state-dir", str(tmp_path), *json_too)
    assert done.returncode == 1
    assert done.stderr.startswith("p2ptrain: error: p2ptrain is not running")
    assert done.stderr.count("\n") == 1


def test_without_stderr_stdout_has_the_json_lines_alone(tmp_path: Path) -> None:
    done = _started_without("2", "status", "--state-dir", str(tmp_path), "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["event"] == "error"


def test_wrong_usage_is_not_reported_on_stdout() -> None:
    done = _started_without("2", "status", "--jsn")
    assert done.returncode == 2
    assert done.stdout == ""
