"""`service`: which programs of the system it runs, which files it writes, and what it says.

The system is a record: it notes what is run and answers as systemd would.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cli import main
from p2ptrain.cli.commands import service
from p2ptrain.cli.service.definition import ProgramAnswer
from p2ptrain.control.member_lock import FolderLock
from p2ptrain.mesh.trust import trust_store

UNITS = Path("config", "systemd", "user")


class FakeSystemd:
    """One unit, and linger."""

    def __init__(self, units: Path) -> None:
        self.units = units
        self.ran: list[str] = []
        self.runs: set[str] = set()
        self.linger = False
        self.says_no: dict[str, ProgramAnswer] = {}

    def __call__(self, words: Sequence[str]) -> ProgramAnswer:
        line = " ".join(words)
        self.ran.append(line)
        for part, answer in self.says_no.items():
            if part in line:
                return answer
        unit = words[-1] if words[-1].endswith(".service") else words[-2]
        match words[2 if words[0] == "systemctl" else 1]:
            case "restart":
                self.runs.add(unit)
            case "disable":
                self.runs.discard(unit)
            case "show":
                return ProgramAnswer(0, self._properties(words[3]))
            case "show-user":
                return ProgramAnswer(0, "Linger=yes" if self.linger else "Linger=no")
            case "--no-ask-password":
                self.linger = words[2] == "enable-linger"
            case "--user-unit":
                return ProgramAnswer(0, "attic-pc is ready at 10.0.0.2 port 47300\n")
        return ProgramAnswer(0)

    def _properties(self, unit: str) -> str:
        load = "loaded" if (self.units / unit).exists() else "not-found"
        active = "active" if unit in self.runs else "inactive"
        return f"LoadState={load}\nActiveState={active}\nSubState=x\nResult=success"


class Commands:
    """`p2ptrain service ...` with that system."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.system = FakeSystemd(root / UNITS)
        self.folder = root / "a state folder"
        self._capsys = capsys

    def run(self, *words: str, code: int = 0) -> dict[str, Any]:
        """The event that it shows; of a failure the error's."""
        argv = ["service", *words, "--json", "--state-dir", str(self.folder)]
        assert main.main(argv) == code
        event: dict[str, Any] = json.loads(self._capsys.readouterr().out.splitlines()[-1])
        return event

    def unit(self) -> str:
        """The only file among the units."""
        (file,) = self.system.units.iterdir()
        return file.read_text(encoding="utf-8")


@pytest.fixture
def commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Commands:
    made = Commands(tmp_path, capfd)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("USER", "kim")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(service.run, "__defaults__", (made.system,))
    return made


@pytest.fixture
def paired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust_store, "is_paired", lambda folder: True)


@pytest.mark.usefixtures("paired")
def test_install_is_done_once_and_uninstall_leaves_nothing(
    commands: Commands, tmp_path: Path
) -> None:
    first = commands.run("install", "--memory", "2GiB", "--quiet-hours=22-7")
    assert (first["state"], first["changed"], first["starts"]) == (
        "running",
        True,
        "with this device",
    )
    assert first["last_line"] == "attic-pc is ready at 10.0.0.2 port 47300"
    assert (
        f'"--memory" "2GiB" "--quiet-hours=22-7" "--state-dir={commands.folder}"' in commands.unit()
    )
    assert commands.system.linger
    commands.system.ran.clear()
    again = commands.run("install", "--memory", "2GiB", "--quiet-hours=22-7")
    assert (again["state"], again["changed"]) == ("running", False)
    assert not [line for line in commands.system.ran if "restart" in line]
    assert commands.run("install")["changed"]
    assert "--memory" not in commands.unit()
    gone = commands.run("uninstall")
    assert (gone["state"], gone["changed"]) == ("not installed", True)
    assert not commands.system.linger  # it was off before
    assert not commands.system.runs
    assert not [*(tmp_path / "config").iterdir()]
    assert commands.run("uninstall")["changed"] is False
    assert commands.run("status")["state"] == "not installed"


@pytest.mark.usefixtures("paired")
def test_linger_that_was_on_before_stays(commands: Commands) -> None:
    commands.system.linger = True
    commands.run("install")
    commands.run("uninstall")
    assert commands.system.linger


@pytest.mark.usefixtures("paired")
def test_where_linger_needs_a_password_it_says_what_to_type(commands: Commands) -> None:
    commands.system.says_no["enable-linger"] = ProgramAnswer(1, "Access denied")
    event = commands.run("install")
    assert (event["state"], event["starts"]) == ("running", "when you log in")
    assert "sudo loginctl enable-linger kim" in event["notes"][0]


@pytest.mark.parametrize("code", [["--code", "12345678"], ["--code=1234 5678"]])
def test_a_pairing_code_is_never_kept(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, code: list[str]
) -> None:
    refused = commands.run("install", *code, code=1)
    assert "p2ptrain join --code CODE once" in refused["message"]
    assert not commands.system.units.exists()
    monkeypatch.setattr(trust_store, "is_paired", lambda folder: True)
    assert commands.run("install", *code)["notes"] == [
        "the pairing code is not kept: this device is paired already"
    ]
    assert "5678" not in commands.unit()


def test_an_unpaired_device_learns_how_to_pair(commands: Commands) -> None:
    (note,) = commands.run("install")["notes"]
    assert "p2ptrain invite" in note


def test_options_are_checked_as_join_does(
    commands: Commands, capfd: pytest.CaptureFixture[str]
) -> None:
    for wrong in (["--memory", "lots"], ["--port", "70000"], ["--nothing"], ["--log-file", "x"]):
        with pytest.raises(SystemExit) as end:
            main.main(["service", "install", *wrong])
        assert end.value.code == 2
    assert not commands.system.ran


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ProgramAnswer(None), "no systemd"),
        (ProgramAnswer(1, "Failed to connect to bus"), "no session"),
    ],
)
@pytest.mark.parametrize("action", ["install", "status", "uninstall"])
def test_a_system_without_services_of_users_is_named(
    commands: Commands, answer: ProgramAnswer, words: str, action: str
) -> None:
    commands.system.says_no["show-environment"] = answer
    assert words in commands.run(action, code=1)["message"]
    assert not commands.system.units.exists()


@pytest.mark.usefixtures("paired")
def test_what_the_system_refuses_is_an_error_with_its_words(commands: Commands) -> None:
    commands.system.says_no["restart"] = ProgramAnswer(1, "Unit is masked.")
    assert "Unit is masked." in commands.run("install", code=1)["message"]


@pytest.mark.usefixtures("paired")
def test_an_environment_that_has_gone_is_named(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "environment" / "python"
    python.parent.mkdir()
    python.touch()
    monkeypatch.setattr(sys, "executable", str(python))
    assert commands.run("install")["state"] == "running"
    python.unlink()
    event = commands.run("status")
    assert (event["state"], event["why"]) == ("failed", "its Python is gone")
    assert str(python) in event["notes"][0]


@pytest.mark.usefixtures("paired")
def test_a_join_that_runs_by_hand_is_named(commands: Commands) -> None:
    with FolderLock(commands.folder, "join"):
        (note,) = commands.run("install")["notes"]
    assert "p2ptrain join (process" in note
