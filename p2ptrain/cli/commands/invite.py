"""`p2ptrain invite`: shows the pairing code and opens the window again."""

from __future__ import annotations

import argparse
from typing import Any

from p2ptrain.cli import arguments
from p2ptrain.cli import output as qr
from p2ptrain.cli.ask_member import ask_member
from p2ptrain.cli.output import Output
from p2ptrain.cli.usage import DONE
from p2ptrain.events import Pairing

_DESCRIPTION = """\
Shows the pairing code and accepts new devices for 10 minutes. Run `p2ptrain join --code CODE`
on the new device within that time. `p2ptrain join` must be running on this device."""


def add_parser(commands: Any) -> None:
    """Add `invite` to the command line."""
    parser = arguments.command(
        commands,
        "invite",
        summary="show the pairing code and let new devices in for 10 minutes",
        description=_DESCRIPTION,
        example="  p2ptrain invite",
    )
    arguments.add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, output: Output) -> int:
    """Show the code."""
    code = ask_member(arguments.state_dir_of(args), lambda member: member.invite())
    output.show(Pairing(code=code))
    if output.is_terminal:
        output.writer.write(qr.terminal_code(f"p2ptrain join --code {code}"))
    return DONE
