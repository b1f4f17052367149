"""Nobody else on the machine can read a code."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from p2ptrain.control.member_lock import LOCK_NAME

CODE = "31415926"


def _waits_for(process: subprocess.Popen[bytes], file: Path) -> None:
    """Another process makes it: nothing to wait on."""
    for _ in range(3000):
        if file.exists():
            return
        assert process.poll() is None, "it ended"
        time.sleep(0.01)
    raise AssertionError(f"{file} did not come")


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads /proc")
@pytest.mark.parametrize("given", [["--code", CODE], [f"--code={CODE[:4]}-{CODE[4:]}"]])
def test_a_code_on_the_command_line_is_not_in_the_list_of_processes(
    tmp_path: Path, given: list[str]
) -> None:
    folder = tmp_path / "state"
    command = [sys.executable, "-m", "p2ptrain", "join", *given, "--state-dir", str(folder)]
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, env={**os.environ})
    try:
        _waits_for(process, folder / LOCK_NAME)
        listed = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
    finally:
        process.kill()
        process.communicate()
    assert b"join" in listed
    assert str(folder).encode() in listed
    assert not [text for text in listed if b"3141" in text or b"--code" in text]
