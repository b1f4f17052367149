"""`p2ptrain remove NAME`: ends the trust in a device at once."""

from __future__ import annotations

import argparse
from typing import Any

from p2ptrain.cli import arguments
from p2ptrain.cli.ask_member import ask_member
from p2ptrain.cli.output import Output
from p2ptrain.cli.usage import DONE

_DESCRIPTION = """\
Takes a device out of the household: its connections end at once, and it has to be paired again
to come back. Trainings that it computes for go on without it."""


def add_parser(commands: Any) -> None:
    """Add `remove` to the command line."""
    parser = arguments.command(
        commands,
        "remove",
        summary="take a device out of the household at once",
        description=_DESCRIPTION,
        example="  p2ptrain remove old-laptop",
    )
    parser.add_argument("name", metavar="NAME", help="the device's name, as `devices` shows it")
    arguments.add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, output: Output) -> int:
    """Remove it."""
    name: str = args.name
    ask_member(arguments.state_dir_of(args), lambda member: member.remove(name))
    output.result(
        {"event": "removed", "name": name}, f"{name} is not part of the household any more"
    )
    return DONE
