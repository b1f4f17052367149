"""p2ptrain's engine beside torch.distributed, on one machine: the same Job in turn, in one run.

    python -m tools.engines tools/bench/models/mobilenetv2.py -o batch_size=96 --micro-batch 16

Each of them trains in processes of one thread each, over the loopback, on the processor:

    local     p2ptrain train --local: one process
    household p2ptrain train --planner dp with two p2ptrain join: discovery, pairing, TLS
    torch     torchrun --nproc-per-node 3 -m p2ptrain train --engine torch: gloo

They take turns, so that what else the machine does meets all of them. Prints one JSON object: the
median samples/s of the steps after the first ones, of each run and over all, and the largest
relative difference of a loss from that of `local`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from p2ptrain.demo.household import ENVIRONMENT, HouseholdPlan, train_together

LEFT_OUT = 3
"""Steps at the beginning of each run, in which memory and links settle."""


def options(args: argparse.Namespace) -> list[str]:
    """What all engines are given."""
    found = [args.script, "--steps", str(args.steps)]
    for setting in args.job_options:
        found += ["-o", setting]
    return found if args.micro_batch is None else [*found, "--micro-batch", str(args.micro_batch)]


def alone(command: Sequence[str]) -> list[dict[str, Any]]:
    """The steps of one command."""
    environment = {**os.environ, **ENVIRONMENT}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr)
    return [json.loads(line) for line in run.stdout.splitlines()]


async def together(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The steps of a household."""
    wanted = ["--wait-for", str(args.ranks), "--planner", "dp", "--no-replan"]
    plan = HouseholdPlan(
        members=[f"member-{number}" for number in range(1, args.ranks)],
        holder="holder",
        code="13572468",
        folder=folder,
        train_arguments=[*options(args), *wanted],
        interface="127.0.0.1",
    )
    return [event async for event in train_together(plan)]


def run(args: argparse.Namespace, engine: str) -> list[dict[str, Any]]:
    """The step events of one run."""
    train = [sys.executable, "-m", "p2ptrain", "train"]
    with tempfile.TemporaryDirectory() as folder:
        if engine == "household":
            found = asyncio.run(together(args, Path(folder)))
        elif engine == "local":
            own = ["--local", "--threads", "1", "--device", "cpu", "--state-dir", folder, "--json"]
            found = alone([*train, *options(args), *own])
        else:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            torchrun += ["--nproc-per-node", str(args.ranks), "-m", "p2ptrain", "train"]
            own = ["--engine", "torch", "--threads", "1", "--device", "cpu", "--json"]
            found = alone([*torchrun, *options(args), *own, "--state-dir", folder])
    return [event for event in found if event["event"] == "step"]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script")
    parser.add_argument("-o", dest="job_options", action="append", default=[])
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--engines", default="local,household,torch")
    args = parser.parse_args()
    engines = args.engines.split(",")
    speeds: dict[str, list[float]] = {engine: [] for engine in engines}
    losses: dict[str, list[float]] = {}
    for _ in range(args.runs):
        for engine in engines:
            steps = run(args, engine)
            speeds[engine].append(median(step["samples_per_s"] for step in steps[LEFT_OUT:]))
            losses[engine] = [step["loss"] for step in steps]
    wanted = losses[engines[0]]
    differs = {
        engine: max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
        for engine, found in losses.items()
    }
    medians = {engine: median(found) for engine, found in speeds.items()}
    print(json.dumps({"samples_per_s": medians, "runs": speeds, "loss_differs": differs}))


if __name__ == "__main__":
    main()
