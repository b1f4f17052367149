"""`profile` writes a file that planning reads, as a whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2ptrain.cli import main as cli
from p2ptrain.cli.files import write_whole
from p2ptrain.plan.profile import Profile


def test_a_model_is_measured_into_a_profile_file(
    script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.json"
    argv = ["profile", script, "--out", str(out), "--batch-sizes", "4,2", "-o", "hidden=6"]
    assert cli.main([*argv, "--json"]) == 0
    profile = Profile.from_json(json.loads(out.read_text()))
    assert profile.times.sizes == (2, 4)
    assert profile.input_bytes == 6 * 4
    assert sum(unit.parameter_bytes for unit in profile.units) == (6 * 2 + 2) * 4
    assert json.loads(capfd.readouterr().out)["units"] == len(profile.units)


def test_a_missing_folder_is_wrong_usage(script: str, tmp_path: Path) -> None:
    assert cli.main(["profile", script, "--out", str(tmp_path / "no" / "p.json")]) == 2


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    out.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(out, "\ud800")
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
