"""A unit of the user's systemd (systemd.service(5), systemd.exec(5)), and loginctl's linger.

A sandbox of mounts (ProtectSystem and the like) is left out: in a user's unit it needs user
namespaces, which several distributions forbid, and the unit would not start there. So is
MemoryDenyWriteExecute: torch compiles kernels while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.cli.service.definition import (
    DESCRIPTION,
    LEAVE_SECONDS,
    RETRY_SECONDS,
    Account,
    AtBoot,
    ProgramAnswer,
    ProgramCall,
    Service,
    ServiceManager,
    ServiceView,
    State,
    writable,
)

_UNIT = """\
# Written by `p2ptrain service install`; `p2ptrain service uninstall` removes it.
[Unit]
Description={description}
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart=:{command}
SyslogIdentifier={name}
Restart=on-failure
RestartSec={retry}
# wrong options, and a Python that is gone, do not get better
RestartPreventExitStatus=2 203
# SIGTERM to join alone, whose other processes help it to hand its work over
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={leave}
# a model that takes too much memory ends its own process, not join
OOMPolicy=continue
UMask=0077
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK

[Install]
WantedBy=default.target

[X-p2ptrain]
Program={program}
TurnedLingerOn={turned_on}
"""

_PROPERTIES = "LoadState,ActiveState,SubState,Result,ExecMainStatus"


class Systemd(ServiceManager):
    """The user's own manager, `systemctl --user`."""

    tried = True

    def __init__(self, name: str, account: Account) -> None:
        """For the service `name` of `account`."""
        self._name = name
        self._unit = f"{name}.service"
        self.file = account.config / "systemd" / "user" / self._unit
        self.logs = f"journalctl --user-unit {self._unit} --follow"
        self.at_boot = AtBoot(
            ask=ProgramCall(("loginctl", "show-user", account.name, "--property=Linger")),
            is_on="Linger=yes",
            on=ProgramCall(("loginctl", "--no-ask-password", "enable-linger", account.name)),
            off=ProgramCall(
                ("loginctl", "--no-ask-password", "disable-linger", account.name), must=False
            ),
            by_hand=f"sudo loginctl enable-linger {account.name}",
        )

    def probe(self) -> ProgramCall:
        """Ask whether the user has a manager."""
        return _systemctl("show-environment")

    def refusal(self, answer: ProgramAnswer) -> str:
        """No systemd, or none for this user."""
        if answer.code is None:
            return (
                "this device has no systemd, so p2ptrain cannot start with it by itself: let your "
                "system start  p2ptrain join  in its own way, for example by  @reboot  in crontab"
            )
        return (
            f"systemd has no session for you here ({answer.text or 'no answer'}): log in as "
            "yourself, at the machine or by ssh, not by su or sudo, and try again. In a container, "
            "and in WSL without systemd, there is none: start  p2ptrain join  another way"
        )

    def content(self, service: Service, *, turned_on: bool) -> bytes:
        """The unit."""
        return _UNIT.format(
            description=DESCRIPTION,
            name=self._name,
            command=" ".join(_quoted(word) for word in writable(service.words)),
            retry=RETRY_SECONDS,
            leave=LEAVE_SECONDS,
            program=service.program,
            turned_on="yes" if turned_on else "no",
        ).encode()

    def turned_on(self, content: bytes) -> bool:
        """From the unit's last lines."""
        return b"\nTurnedLingerOn=yes\n" in content

    def program(self, content: bytes) -> str:
        """From the unit's last lines."""
        lines = content.decode(errors="replace").splitlines()
        found = [line for line in lines if line.startswith("Program=")]
        return found[-1].removeprefix("Program=") if found else ""

    def start(self) -> Sequence[ProgramCall]:
        """Read the unit, start it now and with the user's manager."""
        words = (("daemon-reload",), ("enable", self._unit), ("restart", self._unit))
        return [_systemctl(*each) for each in words]

    def stop(self) -> Sequence[ProgramCall]:
        """Waits until it has left."""
        return (_systemctl("disable", "--now", self._unit, must=False),)

    def forget(self) -> Sequence[ProgramCall]:
        """Its failures too."""
        forget = _systemctl("reset-failed", self._unit, must=False)
        return _systemctl("daemon-reload", must=False), forget

    def look(self) -> Sequence[ProgramCall]:
        """The unit's properties, and the newest line of join's own."""
        own = ("journalctl", "--user-unit", self._unit, "--identifier", self._name)
        log = (*own, "--lines=1", "--output=cat", "--quiet")
        properties = _systemctl("show", self._unit, f"--property={_PROPERTIES}", must=False)
        return properties, ProgramCall((*log, "--no-pager"), must=False)

    def seen(self, answers: Sequence[ProgramAnswer]) -> ServiceView:
        """As systemd's states mean."""
        values = dict(line.split("=", 1) for line in answers[0].text.splitlines() if "=" in line)
        last = answers[1].text.strip() if answers[1].code == 0 else ""
        if values.get("LoadState") != "loaded":
            return ServiceView(State.MISSING)
        active, result = values.get("ActiveState", ""), values.get("Result", "")
        failure = f"{result}, exit code {values.get('ExecMainStatus', '?')}"
        if values.get("SubState") == "auto-restart":
            why = f"{failure}; it starts again every {RETRY_SECONDS} s"
            return ServiceView(State.FAILED, why, last)
        if active == "failed":
            return ServiceView(State.FAILED, failure, last)
        runs = active in ("active", "activating", "reloading", "deactivating")
        return ServiceView(State.RUNNING if runs else State.STOPPED, last_line=last)


def _systemctl(*words: str, must: bool = True) -> ProgramCall:
    return ProgramCall(("systemctl", "--user", *words), must)


def _quoted(word: str) -> str:
    """As systemd splits it; `:` before the command keeps `$` as it is."""
    inside = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{inside}"'
