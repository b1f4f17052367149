"""`p2ptrain status`: the members, the coordinator and the running job."""

from __future__ import annotations

import argparse
from typing import Any

from p2ptrain.cli import arguments
from p2ptrain.cli.ask_member import ask_member, state_of
from p2ptrain.cli.output import Output
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
    folder = arguments.state_dir_of(args)
    status = ask_member(folder, lambda member: member.status())
    if output.json:
        output.result({"event": "status", **status}, "")
        return DONE
    here = f"this device: {status['name']} at {status['address']} port {status['port']}"
    state = ask_member(folder, state_of)
    output.result({}, f"{here}\n{output.draw(state)}")
    return DONE
