"""`p2ptrain devices`: which devices this household trusts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from p2ptrain.cli import arguments
from p2ptrain.cli.ask_member import ask_member
from p2ptrain.cli.output import Output, aligned, words
from p2ptrain.cli.usage import DONE

_DESCRIPTION = """\
Lists the devices that are paired with this household, running or not."""


def add_parser(commands: Any) -> None:
    """Add `devices` to the command line."""
    parser = arguments.command(
        commands,
        "devices",
        summary="list the paired devices",
        description=_DESCRIPTION,
        example="  p2ptrain devices\n  p2ptrain devices --json",
    )
    arguments.add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, output: Output) -> int:
    """List them."""
    devices = ask_member(arguments.state_dir_of(args), lambda member: member.devices())
    output.result({"event": "devices", "devices": devices}, devices_text(devices))
    return DONE


def devices_text(devices: Sequence[Mapping[str, Any]]) -> str:
    """A line a device: its name, the start of its id, and what else is known of it."""
    if not devices:
        return "No paired devices yet. On another device run: p2ptrain join --code CODE"
    rows = [(str(d.get("name", "?")), str(d.get("id", ""))[:12], _rest(d)) for d in devices]
    return "\n".join(aligned([("name", "id", ""), *rows]))


def _rest(device: Mapping[str, Any]) -> str:
    return words({key: value for key, value in device.items() if key not in ("name", "id")})
