"""Whether a firewall is on, from what systems say of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.cli.checks import network
from p2ptrain.cli.checks.check import Severity
from p2ptrain.cli.checks.network import firewall
from p2ptrain.mesh.config import DEFAULT_PORT


def linux(tmp_path: Path) -> Severity:
    return firewall("linux", tmp_path / "ufw.conf", tmp_path / "firewalld").verdict


def test_without_any_there_is_nothing_to_do(tmp_path: Path) -> None:
    assert linux(tmp_path) is Severity.OK


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("ENABLED=yes", Severity.WARN),
        ("enabled = YES", Severity.WARN),
        ("ENABLED=no", Severity.OK),
        ("# ENABLED=yes", Severity.OK),
    ],
)
def test_ufw_says_in_its_settings_whether_it_is_on(
    tmp_path: Path, line: str, verdict: Severity
) -> None:
    (tmp_path / "ufw.conf").write_text(f"# settings\n{line}\nLOGLEVEL=low\n")
    assert linux(tmp_path) is verdict


def test_firewalld_is_on_while_its_folder_is_there(tmp_path: Path) -> None:
    (tmp_path / "firewalld").mkdir()
    found = firewall("linux", tmp_path / "ufw.conf", tmp_path / "firewalld")
    assert found.verdict is Severity.WARN
    assert str(DEFAULT_PORT) in found.advice
    assert "mdns" in found.advice


@pytest.mark.parametrize(
    ("platform", "said", "verdict"),
    [
        ("darwin", "Firewall is enabled. (State = 1)\n", Severity.WARN),
        ("darwin", "Firewall is disabled. (State = 0)\n", Severity.OK),
        ("darwin", "", Severity.OK),
        ("win32", "Public Profile Settings:\n---\nState                 ON\nOk.\n", Severity.WARN),
        ("win32", "Public Profile Settings:\n---\nState                 OFF\nOk.\n", Severity.OK),
    ],
)
def test_other_systems_are_asked(
    monkeypatch: pytest.MonkeyPatch, platform: str, said: str, verdict: Severity
) -> None:
    monkeypatch.setattr(network, "_output_of", lambda command: said)
    assert firewall(platform).verdict is verdict


def test_a_command_that_is_not_there_says_nothing() -> None:
    assert network._output_of(["/does/not/exist"]) == ""
