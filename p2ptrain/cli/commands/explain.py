"""`p2ptrain explain`: what limits the job that runs, or that ran last."""

from __future__ import annotations

import argparse
from typing import Any

from p2ptrain.cli import arguments
from p2ptrain.cli.ask_member import ask_member
from p2ptrain.cli.output import Output
from p2ptrain.cli.usage import DONE
from p2ptrain.control.member_lock import NotRunning
from p2ptrain.errors import UserError

_DESCRIPTION = """\
Says what limits the training that runs, from what is measured: it watches a few rounds, compares
them with the plan and asks the planner what another device, or a faster link, would change. That
takes some seconds. Of a training of this device that has ended it says what was known then."""


def add_parser(commands: Any) -> None:
    """Add `explain` to the command line."""
    parser = arguments.command(
        commands,
        "explain",
        summary="what limits the training, and what would help",
        description=_DESCRIPTION,
        example="  p2ptrain explain\n  p2ptrain explain --json",
    )
    arguments.add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, output: Output) -> int:
    """Ask the member; without one, look what is written down."""
    folder = arguments.state_dir_of(args)
    try:
        found = ask_member(folder, lambda member: member.explain())
    except NotRunning:
        from p2ptrain.job.last_job import last_facts
        from p2ptrain.plan.explain import explained

        facts = last_facts(folder)
        if facts is None:
            raise UserError(
                "nothing runs on this device, and it has held no training before: start  p2ptrain "
                "train  or  p2ptrain join"
            ) from None
        found = explained(facts)
    output.result({"event": "explain", **found}, "\n".join(p["text"] for p in found["points"]))
    return DONE
