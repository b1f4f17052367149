"""How long from `p2ptrain train` to the first step, on an emulated household. Needs root, Linux.

    python -m tools.first_step --shares 0.8,0.2,0.2,0.2,0.2 --rate 100mbit
    python -m tools.first_step --household A --lift --runs 2 -o batch_size=1024

The members are up, paired and idle before `train` starts; every device has its own network
namespace, its share of a core and its cable. Prints one JSON object a run; with `--phases` also
what each device did when (begin, end and length in seconds after the start), from its log.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tools.bench.models import SCRIPT
from tools.bench.processes import Company, Process
from tools.testbed import EmulatedDevice, Household, Testbed

CODE = "24681357"
LIMIT_SECONDS = 280.0
END_SECONDS = 30.0
MILESTONES = ("ready", "plan", "step")
_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) INFO \S+ event='(?P<what>\w+)' "
    r"(?:.* )?seconds=(?P<seconds>[0-9.]+)"
)


class Runs:
    """Trains in a household whose other members stay from one run to the next.

    Args:
        folder: for the devices' states.
    """

    def __init__(self, testbed: Testbed, folder: Path, arguments: argparse.Namespace) -> None:
        self._devices = testbed.devices
        self._folder = folder
        self._arguments = arguments
        self._company = Company(LIMIT_SECONDS)
        self._members: list[Process] = []

    def gather(self) -> None:
        """Start all as members; the holder leaves again when all know each other."""
        starts = [
            (device, self._command(device, "join", "--code", CODE)) for device in self._devices
        ]
        holder, *self._members = self._company.start_lifted(starts)
        known = len(self._devices) - 1
        while any(len(_alive(process)) < known for process in (holder, *self._members)):
            self._company.next()
        holder.end(END_SECONDS)

    def train(self) -> dict[str, Any]:
        """Until the last step. Raises CellError."""
        device, options = self._devices[0], self._arguments
        command = self._command(
            device,
            *("train", options.job, "--wait-for", str(len(self._devices)), "--fresh"),
            *("--steps", str(options.steps), "--planner", options.planner),
            *(part for option in options.option for part in ("-o", option)),
        )
        started = time.time()
        if options.lift:
            (holder,) = self._company.start_lifted([(device, command)])
        else:
            holder = self._company.start(device, *command)
        self._company.expect_each([holder], "done")
        self._show_phases(holder, started)
        holder.exit_code(END_SECONDS)
        return _summary(holder)

    def _show_phases(self, holder: Process, started: float) -> None:
        if self._arguments.phases:
            logs = {process.device.name: process.stderr for process in (holder, *self._members)}
            for phase in phases(logs, started, holder.first_seconds["step"]):
                print(phase, file=sys.stderr)

    def _command(self, device: EmulatedDevice, *arguments: str) -> Sequence[str]:
        state = ("--name", device.name, "--state-dir", str(self._folder / device.name))
        return ("-m", "p2ptrain", *arguments, *state, "--threads", "1", "--json", "--debug")


def _alive(process: Process) -> set[str]:
    members = [event for event in process.said if event["event"] == "member"]
    return {event["name"] for event in members if event["state"] == "alive"} - {process.device.name}


def _summary(holder: Process) -> dict[str, Any]:
    plan, done = (_first(holder, kind) for kind in ("plan", "done"))
    steps = [event for event in holder.said if event["event"] == "step"]
    return {
        "seconds_to": {kind: round(holder.first_seconds[kind], 2) for kind in MILESTONES},
        "stages": [[s["units"], [d["name"] for d in s["devices"]]] for s in plan["stages"]],
        "left_out": plan["left_out"],
        "micro_batch": plan["micro_batch"],
        "predicted_samples_per_s": round(plan["predicted_samples_per_s"], 1),
        "samples_per_s": round(done["samples_per_s"], 1),
        "seconds_of_steps": [round(step["seconds"], 3) for step in steps],
    }


def _first(process: Process, kind: str) -> dict[str, Any]:
    return next(event for event in process.said if event["event"] == kind)


@dataclass(frozen=True, slots=True)
class Phase:
    """Something that a device did.

    Attributes:
        begin, end: seconds after `train` was started.
    """

    device: str
    what: str
    begin: float
    end: float

    def __str__(self) -> str:
        seconds = self.end - self.begin
        return f"{self.begin:6.2f} {self.end:6.2f} {seconds:6.2f}  {self.device:<10} {self.what}"


def phases(logs: Mapping[str, Sequence[str]], started: float, until: float) -> list[Phase]:
    """Every phase that ended between start and first step, in the order of the ends.

    Args:
        logs: device -> the lines of its stderr.
        started: when `train` was, in seconds since 1970.
        until: seconds after `started`.
    """
    found = [phase for name, lines in logs.items() for phase in _phases(name, lines, started)]
    return sorted((p for p in found if 0 <= p.end <= until), key=lambda p: (p.end, p.begin))


def _phases(device: str, lines: Sequence[str], started: float) -> Iterator[Phase]:
    for line in lines:
        match = _LINE.match(line)
        if match is not None:
            at = datetime.strptime(match["time"], "%Y-%m-%d %H:%M:%S,%f").timestamp()
            end = at - started
            yield Phase(device, match["what"], end - float(match["seconds"]), end)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", default="0.8,0.2,0.2,0.2,0.2", help="cores, the holder's first")
    parser.add_argument("--rate", default="100mbit", help="of every cable, as tc writes it")
    parser.add_argument("--household", help="of tools/testbed/households, instead of the two")
    parser.add_argument("--job", default=SCRIPT)
    parser.add_argument("-o", dest="option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--runs", type=int, default=1, help="from the second on profiles are known")
    parser.add_argument("--lift", action="store_true", help="a whole core until `ready`")
    parser.add_argument("--phases", action="store_true", help="on stderr: who did what when")
    return parser.parse_args()


def main() -> None:
    """Run and print."""
    arguments = _parse()
    if arguments.household:
        household = Household.load(arguments.household)
    else:
        shares = [float(share) for share in arguments.shares.split(",")]
        household = Household.of_shares(shares, arguments.rate)
    with tempfile.TemporaryDirectory() as folder, Testbed(household) as testbed:
        runs = Runs(testbed, Path(folder), arguments)
        runs.gather()
        for _ in range(arguments.runs):
            print(json.dumps(runs.train(), indent=1))


if __name__ == "__main__":
    main()
