"""A task of Windows' Task Scheduler (its schema: MS-TSCH 2.5); it runs while its user does.

schtasks answers in the user's language, so PowerShell is asked for states and numbers. `schtasks
/End` ends the process without a signal: for the household that device dies.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from p2ptrain.cli.service.definition import (
    DESCRIPTION,
    Account,
    AtBoot,
    ProgramAnswer,
    ProgramCall,
    Service,
    ServiceView,
    State,
    writable,
)

NAMESPACE = "http://schemas.microsoft.com/windows/2004/02/mit/task"

_SETTINGS = {
    "MultipleInstancesPolicy": "IgnoreNew",
    "DisallowStartIfOnBatteries": "false",
    "StopIfGoingOnBatteries": "false",
    "AllowHardTerminate": "true",
    "StartWhenAvailable": "true",
    "RunOnlyIfNetworkAvailable": "false",
    "AllowStartOnDemand": "true",
    "Enabled": "true",
    "Hidden": "false",
    "RunOnlyIfIdle": "false",
    "ExecutionTimeLimit": "PT0S",  # for ever
    "Priority": "6",  # as programs that users start
}

_FINE = (0, 267009, 267011, 267014)
"""Last results that are no failure: it runs, it has not run yet, the user has ended it."""


class TaskScheduler:
    """One task, named as the service."""

    tried = False
    starts = "when you log in"
    at_boot: AtBoot | None = None

    def __init__(self, name: str, account: Account) -> None:
        """For the service `name` of `account`."""
        self._name = name
        self._user = account.name
        self._end = ProgramCall(("schtasks", "/End", "/TN", name), must=False)
        self.file = account.logs / f"{name}.xml"
        self._log = account.logs / f"{name}.log"
        self.others: tuple[Path, ...] = (self._log,)
        self.logs = f'powershell Get-Content -Wait -Tail 20 "{self._log}"'

    def probe(self) -> ProgramCall:
        """Whether tasks can be asked for."""
        return ProgramCall(("schtasks", "/Query", "/FO", "LIST"))

    def refusal(self, answer: ProgramAnswer) -> str:
        """No Task Scheduler, or not for this user."""
        if answer.code is None:
            return "schtasks is missing, which every Windows has: start  p2ptrain join  yourself"
        return (
            f"the Task Scheduler does not answer ({answer.text or 'no reason given'}): see whether "
            "its service runs (services.msc, Task Scheduler) and try again"
        )

    def content(self, service: Service, *, turned_on: bool) -> bytes:
        """The task, in UTF-16 as schtasks reads it."""
        task = ElementTree.Element("Task", {"version": "1.2", "xmlns": NAMESPACE})
        _add(task, "RegistrationInfo", Description=DESCRIPTION)
        triggers = ElementTree.SubElement(task, "Triggers")
        _add(triggers, "LogonTrigger", Enabled="true", UserId=self._user)
        principals = ElementTree.SubElement(task, "Principals")
        may = {"LogonType": "InteractiveToken", "RunLevel": "LeastPrivilege"}
        _add(principals, "Principal", UserId=self._user, **may).set("id", "Author")
        settings = _add(task, "Settings", **_SETTINGS)
        _add(settings, "RestartOnFailure", Interval="PT1M", Count="255")
        actions = ElementTree.SubElement(task, "Actions", {"Context": "Author"})
        program, *rest = writable((*service.words, "--log-file", str(self._log)))
        command = {"Command": program, "Arguments": subprocess.list2cmdline(rest)}
        _add(actions, "Exec", **command)
        ElementTree.indent(task)
        text = ElementTree.tostring(task, encoding="unicode")
        return f'<?xml version="1.0" encoding="UTF-16"?>\n{text}\n'.encode("utf-16")

    def turned_on(self, content: bytes) -> bool:
        """There is nothing to turn on."""
        return False

    def program(self, content: bytes) -> str:
        """Its command."""
        try:
            task = ElementTree.fromstring(content)
        except ElementTree.ParseError:
            return ""  # it has been changed by hand
        return task.findtext(f".//{{{NAMESPACE}}}Command", "")

    def start(self) -> Sequence[ProgramCall]:
        """Put the task in the place of any other, and run it."""
        create = ("schtasks", "/Create", "/TN", self._name, "/XML", str(self.file), "/F")
        return self._end, ProgramCall(create), ProgramCall(("schtasks", "/Run", "/TN", self._name))

    def stop(self) -> Sequence[ProgramCall]:
        """End and delete it."""
        return self._end, ProgramCall(("schtasks", "/Delete", "/TN", self._name, "/F"), must=False)

    def forget(self) -> Sequence[ProgramCall]:
        """Nothing is left."""
        return ()

    def look(self) -> Sequence[ProgramCall]:
        """State and last result, a line each, and the end of the log."""
        task = f"-TaskName '{self._name}' -ErrorAction Stop"
        ask = (
            f"(Get-ScheduledTask {task}).State",
            f"(Get-ScheduledTaskInfo {task}).LastTaskResult",
        )
        path = str(self._log).replace("'", "''")
        return tuple(
            ProgramCall(
                ("powershell", "-NoProfile", "-NonInteractive", "-Command", command), must=False
            )
            for command in ("; ".join(ask), f"Get-Content -Tail 1 -LiteralPath '{path}'")
        )

    def seen(self, answers: Sequence[ProgramAnswer]) -> ServiceView:
        """From the two lines."""
        about, log = answers
        words = about.text.split()
        last = log.text.strip() if log.code == 0 else ""
        if about.code != 0 or len(words) != 2:
            return ServiceView(State.MISSING)
        if words[0] == "Running":
            return ServiceView(State.RUNNING, last_line=last)
        code = int(words[1]) if words[1].isdigit() else 0
        if code in _FINE:
            return ServiceView(State.STOPPED, last_line=last)
        return ServiceView(State.FAILED, f"exit code {code}", last)


def _add(parent: ElementTree.Element, name: str, **children: str) -> ElementTree.Element:
    element = ElementTree.SubElement(parent, name)
    for child, text in children.items():
        ElementTree.SubElement(element, child).text = text
    return element
