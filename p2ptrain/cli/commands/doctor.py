"""`p2ptrain doctor`: why devices do not find each other, or are slow."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.cli import arguments
from p2ptrain.cli.output import Output
from p2ptrain.cli.usage import DONE, Command

if TYPE_CHECKING:
    from p2ptrain.cli.checks import Check

_DESCRIPTION = """\
Checks this device and its network: versions, clock, memory, accelerators, the state folder, the
network interfaces, firewall and multicast, and which other devices answer within three seconds.
While `join` runs here it also measures how fast the network to the other devices is. Each line is
ok, warn or bad, and says what to do."""


def run(args: argparse.Namespace, output: Output) -> int:
    """Ask everything, show each answer as it comes."""
    asyncio.run(_examine(arguments.state_dir_of(args), output))
    return DONE


async def _examine(folder: Path, output: Output) -> None:
    async for check in _checks(folder):
        body = {"event": "check", **dataclasses.asdict(check)}
        output.result(body, check_text(check))


async def _checks(folder: Path) -> AsyncIterator[Check]:
    from p2ptrain.cli.checks import machine, network

    for check in machine.versions():
        yield check
    yield machine.clock(datetime.date.today())
    yield machine.memory()
    for check in await machine.accelerators():
        yield check
    yield machine.box()
    yield machine.state_folder(folder)
    for check in network.interfaces():
        yield check
    yield network.firewall()
    for check in await network.echoes():
        yield check
    for check in await network.neighbours():
        yield check
    for check in await network.links(folder):
        yield check


def check_text(check: Check) -> str:
    """The verdict, what was found, and below it what to do."""
    line = f"{check.verdict:<5} {check.subject}: {check.found}"
    return f"{line}\n      -> {check.advice}" if check.advice else line


COMMAND = Command(
    "doctor",
    run,
    "why devices don't find each other or are slow",
    _DESCRIPTION,
    "  p2ptrain doctor\n  p2ptrain doctor --json",
)
