"""systemd itself reads the unit that `p2ptrain service install` writes; it is not started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from p2ptrain.cli.service.definition import Account, Service
from p2ptrain.cli.service.systemd import Systemd


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    account = Account("kim", 1000, tmp_path, tmp_path, tmp_path)
    python = tmp_path / "my environment 100%" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    service = Service(str(python), ("--name", 'a "$b" c', f"--state-dir={tmp_path}/a b"))
    unit = tmp_path / Systemd("p2ptrain", account).file.name

    def verify(content: bytes) -> str:
        unit.write_bytes(content)
        command = ["systemd-analyze", "--user", "--man=no", "verify", str(unit)]
        room = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        said = subprocess.run(command, capture_output=True, text=True, env=room, check=False)
        return "\n".join(line for line in said.stderr.splitlines() if "p2ptrain" in line)

    content = Systemd("p2ptrain", account).content(service, turned_on=True)
    assert verify(content) == ""
    assert "Restar" in verify(content.replace(b"\nRestart=", b"\nRestar="))  # it does look
