"""`p2ptrain status`: the members, the coordinator and the running job."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from p2ptrain.cli import arguments
from p2ptrain.cli.ask_member import ask_member
from p2ptrain.cli.output import Output, aligned, words
from p2ptrain.cli.usage import DONE

_DESCRIPTION = """\
Shows which devices are here, which one plans the work, what runs and how fast.
`p2ptrain join` or `train` must be running on this device."""


def add_parser(commands: Any) -> None:
    """Add `status` to the command line."""
    parser = arguments.command(
        commands,
        "status",
        summary="which devices are here and what runs",
        description=_DESCRIPTION,
        example="  p2ptrain status\n  p2ptrain status --json",
    )
    arguments.add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, output: Output) -> int:
    """Show it."""
    status = ask_member(arguments.state_dir_of(args), lambda member: member.status())
    output.result({"event": "status", **status}, status_text(status))
    return DONE


def status_text(status: Mapping[str, Any]) -> str:
    """This device, the members in a table, the coordinator, the job."""
    here = f"this device: {status['name']} at {status['address']} port {status['port']}"
    rows = [("name", "state", ""), *(_member_row(member) for member in status["members"])]
    cut_off = [f"cut off: {d['name']} {d['reason']}" for d in status.get("cut_off", [])]
    last = [_coordinator(status), *cut_off, _job(status.get("job"))]
    return "\n".join([here, *aligned(rows), *last])


def _member_row(member: Mapping[str, Any]) -> tuple[str, str, str]:
    rest = {key: value for key, value in member.items() if key not in ("name", "state", "id")}
    return str(member["name"]), str(member["state"]), words(rest)


def _coordinator(status: Mapping[str, Any]) -> str:
    coordinator = status.get("coordinator")
    if coordinator is None:
        return "plans the work: no device yet"
    return f"plans the work: {coordinator['name']}"


def _job(job: Mapping[str, Any] | None) -> str:
    return "training: none" if job is None else f"training: {words(job)}"
