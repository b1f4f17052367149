"""`p2ptrain demo`: a household on this machine trains a real model on real data."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import tempfile
from pathlib import Path

from p2ptrain.cli.output import Output
from p2ptrain.cli.signals import sigterm_interrupts
from p2ptrain.cli.usage import DONE, Command
from p2ptrain.errors import InternalError, UserError

HOLDER = "study-desktop"

MEMBERS = ("kitchen-laptop", "old-notebook")

STEPS = 132
"""Six epochs of the script's 1,437 images in batches of 64."""

DIES, DIES_AFTER = MEMBERS[-1], 80
"""Whose plug is pulled, and after which step."""

WAIT_SECONDS = 60

LOOPBACK = "127.0.0.1"

_DESCRIPTION = """\
Starts three devices on this computer: separate processes that find each other by multicast,
pair with a code, talk over TLS and train a small convolutional network on scikit-learn's
handwritten digits, each with its own part of the network. One of them is killed in the middle,
and the others go on with exactly the same losses as without that. The last line is the accuracy
on digits the network has not seen. On one computer this is not faster, because the devices
share its cores. Nothing is left behind."""


def run(args: argparse.Namespace, output: Output) -> int:
    """Train, and say how well."""
    if importlib.util.find_spec("sklearn") is None:
        raise UserError("the demo needs scikit-learn: run  pip install 'p2ptrain[demo]'")
    output.show_live("the demo's network", STEPS)
    _introduce(output)
    with sigterm_interrupts() as interrupt, tempfile.TemporaryDirectory(prefix="p2ptrain-") as room:
        output.writer.on_closed = interrupt
        accuracy = asyncio.run(_train(Path(room), output))
    output.close()
    output.result({"event": "demo", "test_accuracy": accuracy}, f"test accuracy {accuracy:.3f}")
    return DONE


def _introduce(output: Output) -> None:
    if not output.json:
        names = ", ".join((HOLDER, *MEMBERS))
        output.writer.write(
            f"Three devices on this computer: {names}.\n"
            "They share its cores, so this shows how p2ptrain works, not how fast."
        )


async def _train(room: Path, output: Output) -> float:
    """Show the holder's events; returns the accuracy after the last step."""
    from p2ptrain import events
    from p2ptrain.demo.household import HouseholdPlan, parse_event, train_together
    from p2ptrain.events import Eval, Step
    from p2ptrain.mesh.trust.pairing_window import new_code

    plan = HouseholdPlan(
        MEMBERS,
        HOLDER,
        new_code(),
        room,
        _train_arguments(),
        await _interface(),
        dies=DIES,
        dies_after=DIES_AFTER,
    )
    accuracy: float | None = None
    async with contextlib.aclosing(train_together(plan)) as bodies:
        async for body in bodies:
            event = parse_event(body)
            if event is not None:
                output.show(event)
            if isinstance(event, Step) and event.step == DIES_AFTER:
                output.show(events.Warning(f"{DIES} is killed now, in the middle of its work"))
            if isinstance(event, Eval):
                accuracy = event.metrics["accuracy"]
    if accuracy is None:
        raise InternalError("the demo's training ended without its evaluation")
    return accuracy


async def _interface() -> str | None:
    """Loopback where it carries multicast: then a real household does not see the demo's devices,
    whose code would count as a wrong try there."""
    from p2ptrain.cli.checks.network import ECHO_SECONDS, echo

    try:
        return LOOPBACK if await echo(LOOPBACK, ECHO_SECONDS) else None
    except OSError:
        return None


def _train_arguments() -> list[str]:
    script = Path(__file__).parents[2] / "demo" / "digits.py"
    devices = str(1 + len(MEMBERS))
    return [
        *(str(script), "--steps", str(STEPS), "--planner", "pp"),
        *("--wait-for", devices, "--wait-timeout", str(WAIT_SECONDS)),
    ]


COMMAND = Command(
    "demo",
    run,
    "try it: three devices on this computer train a real model",
    _DESCRIPTION,
    "  p2ptrain demo",
)
