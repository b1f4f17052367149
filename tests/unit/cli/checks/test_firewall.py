"""Whether a firewall is on, from what systems say of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.cli.checks import network as checks
from p2ptrain.cli.checks.check import Verdict
from p2ptrain.cli.checks.network import firewall
from p2ptrain.mesh.config import DEFAULT_PORT


def linux(tmp_path: Path) -> Verdict:
    return firewall("linux", tmp_path / "ufw.conf", tmp_path / "firewalld").verdict


def test_without_any_there_is_nothing_to_do(tmp_path: Path) -> None:
    assert linux(tmp_path) is Verdict.OK


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("ENABLED=yes", Verdict.WARN),
        ("enabled = YES", Verdict.WARN),
        ("ENABLED=no", Verdict.OK),
        ("# ENABLED=yes", Verdict.OK),
    ],
)
def test_ufw_says_in_its_settings_whether_it_is_on(
    tmp_path: Path, line: str, verdict: Verdict
) -> None:
    (tmp_path / "ufw.conf").write_text(f"# settings\n{line}\nLOGLEVEL=low\n")
    assert linux(tmp_path) is verdict


def test_firewalld_is_on_while_its_folder_is_there(tmp_path: Path) -> None:
    (tmp_path / "firewalld").mkdir()
    found = firewall("linux", tmp_path / "ufw.conf", tmp_path / "firewalld")
    assert found.verdict is Verdict.WARN
    assert str(DEFAULT_PORT) in found.advice
    assert "mdns" in found.advice


@pytest.mark.parametrize(
    ("platform", "said", "verdict"),
    [
        ("darwin", "Firewall is enabled. (State = 1)\n", Verdict.WARN),
        ("darwin", "Firewall is disabled. (State = 0)\n", Verdict.OK),
        ("darwin", "", Verdict.OK),
        ("win32", "Public Profile Settings:\n---\nState                 ON\nOk.\n", Verdict.WARN),
        ("win32", "Public Profile Settings:\n---\nState                 OFF\nOk.\n", Verdict.OK),
    ],
)
def test_other_systems_are_asked(
    monkeypatch: pytest.MonkeyPatch, platform: str, said: str, verdict: Verdict
) -> None:
    monkeypatch.setattr(checks, "_said", lambda command: said)
    assert firewall(platform).verdict is verdict


def test_a_command_that_is_not_there_says_nothing() -> None:
    assert checks._said(["/does/not/exist"]) == ""
