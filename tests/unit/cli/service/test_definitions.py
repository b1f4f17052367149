"""What is written for each system, held against the rules of what reads it; none is started."""

from __future__ import annotations

import plistlib
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from p2ptrain.cli.service.definition import (
    LEAVE_SECONDS,
    Account,
    ProgramAnswer,
    Service,
    ServiceManager,
    State,
    service_name,
)
from p2ptrain.cli.service.desktops import NAMESPACE, Launchd, TaskScheduler
from p2ptrain.cli.service.systemd import Systemd
from p2ptrain.errors import UserError

ACCOUNT = Account("kim", 1000, Path("/home/kim"), Path("/home/kim/.config"), Path("/home/kim/logs"))
FOLDER = '/home/kim/my state, 100% $HOME \\ "it\'s"'
SERVICE = Service("/opt/my env/bin/python", ("--memory", "2GiB", f"--state-dir={FOLDER}"))
WORDS = ["/opt/my env/bin/python", "-P", "-m", "p2ptrain", "join", *SERVICE.options]
ALL = (Systemd, Launchd, TaskScheduler)


def test_a_unit_starts_exactly_these_words_and_lets_join_leave() -> None:
    text = Systemd("p2ptrain", ACCOUNT).content(SERVICE, turned_on=False).decode()
    (command,) = [line for line in text.splitlines() if line.startswith("ExecStart=:")]
    assert shlex.split(command.removeprefix("ExecStart=:").replace("%%", "%")) == WORDS
    for line in ("Restart=on-failure", "KillMode=mixed", "KillSignal=SIGTERM", "UMask=0077"):
        assert f"\n{line}\n" in text
    assert f"\nTimeoutStopSec={LEAVE_SECONDS}\n" in text
    assert "\nNoNewPrivileges=yes\n" in text


def test_an_agent_is_a_property_list_as_launchd_reads_it() -> None:
    agent = plistlib.loads(Launchd("p2ptrain", ACCOUNT).content(SERVICE, turned_on=False))
    assert agent.pop("ProgramArguments") == WORDS
    log = str(ACCOUNT.home / "Library" / "Logs" / "p2ptrain.log")
    assert agent == {
        "Label": "p2ptrain",
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": LEAVE_SECONDS,
        "ProcessType": "Interactive",
        "Umask": 0o077,
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }


def test_a_task_has_what_the_scheduler_requires() -> None:
    content = TaskScheduler("p2ptrain", ACCOUNT).content(SERVICE, turned_on=False)
    assert content.startswith(b"\xff\xfe")  # schtasks reads UTF-16 with its mark
    task = ElementTree.fromstring(content)
    names = ["RegistrationInfo", "Triggers", "Principals", "Settings", "Actions"]
    assert [element.tag for element in task] == [f"{{{NAMESPACE}}}{name}" for name in names]
    assert task.get("version") == "1.2"

    def text(path: str) -> str:
        return task.findtext("/".join(f"{{{NAMESPACE}}}{part}" for part in path.split("/")), "")

    actions = task.find(f"{{{NAMESPACE}}}Actions")
    principal = task.find(f"{{{NAMESPACE}}}Principals/{{{NAMESPACE}}}Principal")
    assert actions is not None
    assert principal is not None
    assert actions.get("Context") == principal.get("id")  # the action runs as this principal
    assert text("Triggers/LogonTrigger/UserId") == text("Principals/Principal/UserId") == "kim"
    assert text("Settings/ExecutionTimeLimit") == "PT0S"
    assert text("Settings/RestartOnFailure/Interval") == "PT1M"
    assert text("Settings/DisallowStartIfOnBatteries") == "false"
    assert text("Actions/Exec/Command") == WORDS[0]
    arguments = text("Actions/Exec/Arguments")
    assert "--memory 2GiB" in arguments
    assert arguments.endswith(f"--log-file {ACCOUNT.logs / 'p2ptrain.log'}")


@pytest.mark.parametrize("kind", ALL)
def test_a_file_says_which_python_it_starts_and_a_changed_one_nothing(
    kind: type[ServiceManager],
) -> None:
    manager = kind("p2ptrain", ACCOUNT)  # type: ignore[call-arg]
    assert manager.program(manager.content(SERVICE, turned_on=True)) == SERVICE.program
    for broken in (b"", b"\xff\x00", b"<plist>", b"<Task/>", b"<plist><array/></plist>"):
        assert manager.program(broken) == ""


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("path", ["/tmp/a\nb", "/tmp/\udcff", "/tmp/\x07"])
def test_a_path_that_no_definition_can_hold_is_refused(
    kind: type[ServiceManager], path: str
) -> None:
    manager = kind("p2ptrain", ACCOUNT)  # type: ignore[call-arg]
    with pytest.raises(UserError, match="cannot be started with"):
        manager.content(Service("/usr/bin/python3", (f"--state-dir={path}",)), turned_on=False)


def test_each_state_folder_has_a_service_of_its_own() -> None:
    usual = Path("/home/kim/.local/share/p2ptrain")
    names = {service_name(folder, usual) for folder in (usual, Path("/a"), Path("/b"))}
    assert len(names) == 3
    assert "p2ptrain" in names


UNIT = "LoadState={}\nActiveState={}\nSubState={}\nResult={}\nExecMainStatus={}"
AGENT = "gui/501/p2ptrain = {{\n\tstate = {}\n\tlast exit code = {}\n}}"


@pytest.mark.parametrize(
    ("kind", "text", "state", "why"),
    [
        (Systemd, UNIT.format("loaded", "active", "running", "success", 0), "running", ""),
        (Systemd, UNIT.format("loaded", "inactive", "dead", "success", 0), "stopped", ""),
        (Systemd, UNIT.format("not-found", "inactive", "dead", "success", 0), "not installed", ""),
        (
            *(Systemd, UNIT.format("loaded", "failed", "failed", "exit-code", 203)),
            *("failed", "exit-code, exit code 203"),
        ),
        (
            *(Systemd, UNIT.format("loaded", "activating", "auto-restart", "signal", 9)),
            *("failed", "signal, exit code 9; it starts again every 10 s"),
        ),
        (Launchd, AGENT.format("running", 0), "running", ""),
        (Launchd, AGENT.format("not running", 0), "stopped", ""),
        (
            *(Launchd, AGENT.format("not running", 1), "failed"),
            "exit code 1; it starts again every 10 s",
        ),
        (TaskScheduler, "Running\n267009", "running", ""),
        (TaskScheduler, "Ready\r\n0", "stopped", ""),
        (TaskScheduler, "Ready\r\n2", "failed", "exit code 2"),
    ],
)
def test_what_the_system_says_in_one_word(
    kind: type[ServiceManager], text: str, state: str, why: str
) -> None:
    manager = kind("p2ptrain", ACCOUNT)  # type: ignore[call-arg]
    seen = manager.seen([ProgramAnswer(0, text), ProgramAnswer(0, "kitchen-laptop is here\n")])
    assert (str(seen.state), seen.why) == (state, why)
    assert seen.last_line == ("" if seen.state is State.MISSING else "kitchen-laptop is here")


@pytest.mark.parametrize("kind", [Launchd, TaskScheduler])
def test_what_the_system_does_not_know_is_not_installed(kind: type[ServiceManager]) -> None:
    manager = kind("p2ptrain", ACCOUNT)  # type: ignore[call-arg]
    nothing = [ProgramAnswer(1, "could not find"), ProgramAnswer(1, "no such file")]
    assert manager.seen(nothing).state is State.MISSING
