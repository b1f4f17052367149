"""`p2ptrain service`: `join` starts with the machine, by the system's own manager of services."""

from __future__ import annotations

import argparse
import getpass
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from p2ptrain.cli import arguments, pairing_code
from p2ptrain.cli.commands import join
from p2ptrain.cli.output import Output
from p2ptrain.cli.service.definition import Account, Service, ServiceManager, State, service_name
from p2ptrain.cli.service.shell import Report, Runner, ServiceShell, run_program
from p2ptrain.cli.usage import DONE, Command, Parser
from p2ptrain.control.member_lock import FolderBusy, FolderLock
from p2ptrain.errors import UserError
from p2ptrain.mesh.identity.state_folder import StateFolder, usual_state_dir

_DESCRIPTION = """\
Starts `p2ptrain join` with this machine: as a unit of your systemd (Linux), a launch agent (macOS)
or a task (Windows). On macOS and Windows it starts when you log in."""

_INSTALL = """\
Starts `p2ptrain join` now and with this machine, until `p2ptrain service uninstall`. Options of
join given here are kept; the pairing code is not: pair this device first. Run again, it replaces
the options by those of the last time."""

_EXAMPLE = """\
  p2ptrain service install --memory 2GiB
  p2ptrain service status
  p2ptrain service uninstall"""

_OF_THIS_COMMAND = ("--json", "--debug")

_FOLDER = "--state-dir"


class _Keeps(Parser):
    """Keeps the words that it was given, as `words`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as usual."""
        words = list(sys.argv[1:] if args is None else args)
        parsed, rest = super().parse_known_args(words, namespace)
        parsed.words = words
        return parsed, rest


def add_parser(commands: Any) -> None:
    """Add `service` to the command line."""
    parser = Command("service", None, "start join with this machine", _DESCRIPTION, _EXAMPLE).add(
        commands, arguments.add_common
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, parser_class=_Keeps)
    Command(
        "install",
        run,
        "start join now and with this machine",
        _INSTALL,
        "  p2ptrain service install\n  p2ptrain service install --memory 2GiB --threads 2",
        join.add_options,
        defaults={"action": _install},
    ).add(actions, arguments.add_common)
    for name, act, summary in (
        ("status", _status, "whether it runs, and its newest line"),
        ("uninstall", _uninstall, "stop it, and remove all that install has made"),
    ):
        example = f"  p2ptrain service {name}\n  p2ptrain service {name} --json"
        explained = f"{summary[0].upper()}{summary[1:]}."
        command = Command(name, run, summary, explained, example, defaults={"action": act})
        command.add(actions, arguments.add_common)


def run(args: argparse.Namespace, output: Output, runner: Runner = run_program) -> int:
    """Install, show or remove the service of this state folder."""
    folder = arguments.state_dir_of(args)
    manager = _manager(service_name(folder, usual_state_dir()))
    report: Report = args.action(args, ServiceShell(manager, runner), folder)
    view = report.view
    body = {
        "event": "service",
        "state": str(view.state),
        "changed": report.changed,
        "starts": report.starts,
        "why": view.why,
        "last_line": view.last_line,
        "file": str(manager.file),
        "logs": manager.logs,
        "notes": [*report.notes],
    }
    output.result(body, _text(report, manager, of_install=args.action is _install))
    return DONE


def _install(args: argparse.Namespace, shell: ServiceShell, folder: Path) -> Report:
    runs = shell.status().view.state is State.RUNNING
    paired = _is_paired(folder)
    notes = _code_note(args, paired=paired) + ([] if runs else _other_process(folder))
    if not paired:
        notes.append(
            "this device is paired with no other yet. Show its code by  p2ptrain invite , and run  "
            "p2ptrain join --code CODE  on each other device. If those run already, stop this "
            "service (p2ptrain service uninstall), run  p2ptrain join --code CODE  here once, with "
            "the code that  p2ptrain invite  shows there, and install it again"
        )
    words = kept_words(args.words)
    report = shell.install(Service(_python(), (*words, f"{_FOLDER}={folder}")))
    return Report(report.view, report.starts, report.changed, (*report.notes, *notes))


def _status(args: argparse.Namespace, shell: ServiceShell, folder: Path) -> Report:
    return shell.status()


def _uninstall(args: argparse.Namespace, shell: ServiceShell, folder: Path) -> Report:
    return shell.uninstall()


def kept_words(words: Sequence[str]) -> list[str]:
    """The options of `join` among those of `install`, which has understood them; no code, and no
    folder, whose path may begin where this command stands."""
    kept: list[str] = []
    ahead = iter(words)
    for word in ahead:
        option, equals, _ = word.partition("=")
        if option in (_FOLDER, pairing_code.OPTION, pairing_code.FILE_OPTION):
            _ = equals or next(ahead, "")
        elif word not in _OF_THIS_COMMAND:
            kept.append(word)
    return kept


def _code_note(args: argparse.Namespace, *, paired: bool) -> list[str]:
    """A code is only good for pairing.

    Raises:
        UserError: this device still needs it.
    """
    given = args.code is not None or args.code_file is not None
    if not given and not os.environ.get(pairing_code.VARIABLE):
        return []
    if not paired:
        raise UserError(
            "a service keeps no pairing code, and this device is paired with no other yet: run  "
            "p2ptrain join --code CODE  once, stop it (Ctrl-C) when it shows the other device, "
            "then  p2ptrain service install"
        )
    return ["the pairing code is not kept: this device is paired already"]


def _is_paired(folder: Path) -> bool:
    from p2ptrain.mesh.trust.trust_store import is_paired  # here: --help need not load it

    return is_paired(StateFolder(folder))


def _other_process(folder: Path) -> list[str]:
    """What has the folder, unless that is the service itself."""
    lock = FolderLock(folder, "service install")
    try:
        lock.take()
    except FolderBusy as busy:
        return [f"{busy.holder} has the state folder now"]
    lock.release()
    return []


def _python() -> str:
    """The Python of this environment; on Windows the one that opens no window."""
    windowless = Path(sys.executable).with_name("pythonw.exe")
    return str(windowless) if windowless.exists() else sys.executable


def _manager(name: str) -> ServiceManager:
    import platformdirs  # here, so that --help need not load it

    from p2ptrain.cli.service.desktops import Launchd, TaskScheduler
    from p2ptrain.cli.service.systemd import Systemd

    home = Path.home()
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    logs = Path(platformdirs.user_log_dir("p2ptrain", appauthor=False))
    domain = os.environ.get("USERDOMAIN") if sys.platform == "win32" else None
    user = f"{domain}\\{getpass.getuser()}" if domain else getpass.getuser()
    account = Account(user, getattr(os, "getuid", int)(), home, config, logs)
    kinds: Mapping[str, Callable[[str, Account], ServiceManager]] = {
        "darwin": Launchd,
        "win32": TaskScheduler,
    }
    return kinds.get(sys.platform, Systemd)(name, account)


def _text(report: Report, manager: ServiceManager, *, of_install: bool) -> str:
    view = report.view
    lines = [f"service: {view.state}"]
    if view.state is State.MISSING and report.changed:
        lines = ["service: removed; nothing of it is left"]
    elif of_install and not report.changed:
        lines[0] += ", as it was"
    if view.why:
        lines[0] += f" ({view.why})"
    if view.state is not State.MISSING:
        starts = [f"it starts {report.starts}"] if report.starts else []
        last = [f"newest line: {view.last_line}"] if view.last_line else []
        lines += [*starts, *last, f"its log: {manager.logs}"]
        if of_install and not manager.tried:
            lines.append("this kind of service was checked by its rules and never run: tell us")
    return "\n".join([*lines, *report.notes])
