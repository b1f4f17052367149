"""Services that start when their user logs in: macOS's launch agents and Windows' tasks.

A launch agent is a property list (launchd.plist(5)); a task is XML (MS-TSCH 2.5). schtasks answers
in the user's language, so PowerShell is asked for states and numbers. `schtasks /End` ends the
process without a signal: for the household that device dies.
"""

from __future__ import annotations

import plistlib
import re
import subprocess
from collections.abc import Sequence
from xml.etree import ElementTree
from xml.parsers.expat import ExpatError

from p2ptrain.cli.service.definition import (
    DESCRIPTION,
    LEAVE_SECONDS,
    RETRY_SECONDS,
    Account,
    ProgramAnswer,
    ProgramCall,
    Service,
    ServiceManager,
    ServiceView,
    State,
    writable,
)


class Launchd(ServiceManager):
    """The user's own domain, `gui/UID`."""

    def __init__(self, name: str, account: Account) -> None:
        """For the service `name` of `account`."""
        self._name = name
        self._domain = f"gui/{account.uid}"
        self._target = f"{self._domain}/{name}"
        self.file = account.home / "Library" / "LaunchAgents" / f"{name}.plist"
        self._log = account.home / "Library" / "Logs" / f"{name}.log"
        self.others = (self._log,)
        self.logs = f"tail -f '{self._log}'"

    def probe(self) -> ProgramCall:
        """Ask for the user's domain."""
        return ProgramCall(("launchctl", "print", self._domain))

    def refusal(self, answer: ProgramAnswer) -> str:
        """No launchd, or no user has logged in."""
        if answer.code is None:
            return "launchctl is missing, which every macOS has: start  p2ptrain join  yourself"
        return (
            f"launchd has no session for you ({answer.text or 'no answer'}): log in at the Mac's "
            "own screen, not only by ssh, and try again"
        )

    def content(self, service: Service, *, turned_on: bool) -> bytes:
        """The property list."""
        return plistlib.dumps(
            {
                "Label": self._name,
                "ProgramArguments": [*writable(service.words)],
                "RunAtLoad": True,
                "KeepAlive": {"SuccessfulExit": False},
                "ThrottleInterval": RETRY_SECONDS,
                "ExitTimeOut": LEAVE_SECONDS,
                "ProcessType": "Interactive",  # else macOS throttles what computes
                "Umask": 0o077,
                "StandardOutPath": str(self._log),
                "StandardErrorPath": str(self._log),
            }
        )

    def program(self, content: bytes) -> str:
        """The first of its arguments."""
        try:
            return str(plistlib.loads(content)["ProgramArguments"][0])
        except (plistlib.InvalidFileException, ExpatError, ValueError, LookupError, TypeError):
            return ""  # it has been changed by hand

    def start(self) -> Sequence[ProgramCall]:
        """Load the agent, which starts it."""
        load = ProgramCall(("launchctl", "bootstrap", self._domain, str(self.file)))
        return *self.stop(), ProgramCall(("launchctl", "enable", self._target)), load

    def stop(self) -> Sequence[ProgramCall]:
        """SIGTERM, and unload it."""
        return (ProgramCall(("launchctl", "bootout", self._target), must=False),)

    def look(self) -> Sequence[ProgramCall]:
        """The agent as launchd has it, and the end of its log."""
        last = ProgramCall(("tail", "-n", "1", str(self._log)), must=False)
        return ProgramCall(("launchctl", "print", self._target), must=False), last

    def seen(self, answers: Sequence[ProgramAnswer]) -> ServiceView:
        """From launchd's text for people: its first `state =` and `last exit code =`."""
        about, log = answers
        last = log.text.strip() if log.code == 0 else ""
        if about.code != 0:
            return ServiceView(State.MISSING)
        if re.search(r"^\s*state = running", about.text, re.M):
            return ServiceView(State.RUNNING, last_line=last)
        code = re.search(r"^\s*last exit code = (\d+)", about.text, re.M)
        if code is None or code[1] == "0":
            return ServiceView(State.STOPPED, last_line=last)
        why = f"exit code {code[1]}; it starts again every {RETRY_SECONDS} s"
        return ServiceView(State.FAILED, why, last)


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


class TaskScheduler(ServiceManager):
    """One task, named as the service."""

    def __init__(self, name: str, account: Account) -> None:
        """For the service `name` of `account`."""
        self._name = name
        self._user = account.name
        self._end = ProgramCall(("schtasks", "/End", "/TN", name), must=False)
        self.file = account.logs / f"{name}.xml"
        self._log = account.logs / f"{name}.log"
        self.others = (self._log,)
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
