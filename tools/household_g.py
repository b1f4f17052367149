"""A household that changes while it trains: two devices, two more, one leaves, one slows down.

    python tools/household_g.py [--out g.json] [--planner auto] [--model cnn] [--steps 12]

    start      holder and one, of four equal devices
    join       two more
    leave      one goes (SIGTERM)
    slow       one has a quarter of its share left

After each change the household trains on for some rounds under whatever plan it has come to; then
the same devices, with the same shares, start the same job anew, with profiles measured anew: what
a fresh plan gives. Throughputs are medians of rounds; a change's pause is what the first step after
it takes longer than the others. Needs root, Linux (`tools/testbed`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.bench.processes import Company, Process  # noqa: E402
from tools.testbed import EmulatedDevice, Testbed  # noqa: E402

CODE = "24681357"
SHARE, SLOWED = 0.36, 0.09
WARM_ROUNDS = 2
LIMIT_SECONDS = 240.0
"""Of the changing household, or of one fresh start."""
JOB = str(ROOT / "tools" / "predicted_round_job.py")


@dataclass(frozen=True, slots=True)
class Phase:
    """What the household gave between two changes.

    Attributes:
        plans: (reason, stages as units and devices) that came in it.
        round_seconds: median.
        pauses: (reason, seconds) of each change: what the first step after it took longer.
    """

    name: str
    samples_per_s: float
    plans: tuple[tuple[str, list[Any]], ...]
    round_seconds: float
    pauses: tuple[tuple[str, float], ...]


class Changing:
    """The devices' processes; the first device holds the data."""

    def __init__(self, testbed: Testbed, folder: Path, options: Sequence[str]) -> None:
        self._folder = folder
        self._options = options
        self._heard = 0  # of what the holder has said
        self.company = Company(LIMIT_SECONDS)
        self.joined: dict[str, Process] = {}
        self.holder: Process

    def start(self, devices: Sequence[EmulatedDevice]) -> None:
        """The holder's job, and those that join."""
        first, *others = devices
        train = ("train", JOB, *self._options, "--fresh")
        wait = ("--wait-for", str(len(devices)), "--steps", "100000")
        starts = [(first, self._command(first, *train, *wait))]
        starts += [(device, self._command(device, "join")) for device in others]
        self.holder, *rest = self.company.start_lifted(starts)
        self.joined |= {p.device.name: p for p in rest}

    def join(self, devices: Sequence[EmulatedDevice]) -> None:
        """More devices."""
        starts = [(device, self._command(device, "join")) for device in devices]
        for process in self.company.start_lifted(starts):
            self.joined[process.device.name] = process

    def rounds(self, count: int, reason: str | None) -> Phase:
        """Wait for so many rounds, after the plan for `reason` if one is given, and their plans."""
        plans: list[tuple[str, list[Any]]] = []
        firsts: list[tuple[str, float]] = []  # steps after a change: why, seconds
        seconds: list[float] = []
        samples: list[float] = []
        while len(seconds) < WARM_ROUNDS + count:
            for event in self.holder.said[self._heard :]:
                self._heard += 1
                if event["event"] == "plan":
                    plans.append((event["reason"], _stages(event)))
                    seconds, samples = [], []
                    firsts.append((event["reason"], 0.0))
                elif event["event"] == "step" and firsts and firsts[-1][1] == 0.0:
                    firsts[-1] = (firsts[-1][0], event["seconds"])
                elif event["event"] == "step" and (reason is None or _has(plans, reason)):
                    seconds.append(event["seconds"])
                    samples.append(event["samples_per_s"])
            if len(seconds) < WARM_ROUNDS + count:
                self.company.next()
        rate = statistics.median(samples[WARM_ROUNDS:])
        usual = statistics.median(seconds[WARM_ROUNDS:])
        pauses = [(why, first - usual) for why, first in firsts if why != "start"]
        return Phase(reason or "start", rate, tuple(plans), usual, tuple(pauses))

    def end(self) -> None:
        """All of it."""
        for process in [self.holder, *self.joined.values()]:
            process.end(30.0)

    def _command(self, device: EmulatedDevice, *command: str) -> tuple[str, ...]:
        state = ("--state-dir", str(self._folder / device.name))
        own = ("--name", device.name, "--threads", "1", "--code", CODE, "--json")
        return ("-m", "p2ptrain", *command, *own, *state)


def _stages(plan: dict[str, Any]) -> list[Any]:
    return [[s["units"], [[d["name"], d["share"]] for d in s["devices"]]] for s in plan["stages"]]


def _has(plans: Sequence[tuple[str, list[Any]]], reason: str) -> bool:
    return any(plan[0] == reason for plan in plans)


def change(testbed: Testbed, folder: Path, options: Sequence[str], rounds: int) -> list[Phase]:
    """The household through its changes."""
    household = Changing(testbed, folder, options)
    a, b, c, d = testbed.devices
    household.start([a, b])
    phases = [household.rounds(rounds, None)]
    household.join([c, d])
    phases.append(household.rounds(rounds, "join"))
    household.joined.pop("device1").end(60.0)
    phases.append(household.rounds(rounds, "leave"))
    c.set_cores(SLOWED)
    phases.append(household.rounds(rounds, "drift"))
    household.end()
    return phases


def fresh(shares: Sequence[float], folder: Path, options: Sequence[str], rounds: int) -> Phase:
    """The same devices, started anew."""
    with Testbed.of_shares(shares, "100mbit") as testbed:
        household = Changing(testbed, folder, options)
        household.start(testbed.devices)
        phase = household.rounds(rounds, None)
        household.end()
        return phase


def main() -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--model", default="cnn", choices=("mlp", "cnn", "transformer"))
    parser.add_argument("--steps", type=int, default=12, help="rounds that count (default: 12)")
    arguments = parser.parse_args()
    options = ["-o", f"model={arguments.model}", "-o", "batch_size=256", "-o", "micro_batch=32"]
    options += ["--planner", arguments.planner]
    fresh_shares = {
        "join": [SHARE] * 4,
        "leave": [SHARE] * 3,
        "drift": [SHARE, SLOWED, SHARE],
    }
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="p2ptrain-g-") as folder:
        with Testbed.of_shares([SHARE] * 4, "100mbit") as testbed:
            phases = change(testbed, Path(folder), options, arguments.steps)
        for phase in phases:
            for reason, stages in phase.plans:
                print(f"  plan for {reason}: {stages}", flush=True)
            for reason, seconds in phase.pauses:
                print(f"  pause for {reason}: {seconds:.2f} s, a round {phase.round_seconds:.2f} s")
            result[phase.name] = asdict(phase)
            shares = fresh_shares.get(phase.name)
            line = f"{phase.name}: {phase.samples_per_s:.1f} samples/s"
            if shares is not None:
                where = Path(folder) / f"fresh-{phase.name}"
                anew = fresh(shares, where, options, arguments.steps)
                result[phase.name]["fresh"] = asdict(anew)
                line += f", fresh {anew.samples_per_s:.1f}: "
                line += f"{phase.samples_per_s / anew.samples_per_s:.2f}"
            print(line, flush=True)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
