"""Processor time that planning takes on three questions, and how good the plans are.

    python -m tools.planning_time [--rounds 3] [--only NAME]... [--keep FOLDER]

    efficientnet   EfficientNet-B1 on 32 x 32 pictures, on Asteroid's Env. C (1 NX, 2 TX2, 3 Nano
                   at 100 Mbit/s), whose own planner needs 480 s (its table 7)
    sixty-four     64 units on 64 unlike devices
    thousand       24 units on 1,000 unlike devices

`p2ptrain plan` and `p2ptrain plan --help` run in turns as processes on one core; what counts is
the difference of their processor times. Profiles and clusters are synthetic, the same every time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.profile import Profile
from tests.support.planning_examples import household
from tools.paper_testbeds import ENVIRONMENTS, by_flops, cluster, model

PLANNERS = ("auto", "single", "pp", "dp", "hybrid")


@dataclass(frozen=True, slots=True)
class Question:
    """One planning question; the first device of the cluster is the holder."""

    name: str
    profile: Profile
    cluster: Cluster
    batch_size: int


def unlike_devices(count: int, seed: int) -> Cluster:
    """Slowdowns of 1 to 8 and 1 to 8 GB; a tenth of the devices has a link of 1 Gbit/s."""
    random = Random(seed)
    names = [f"device-{i:03}" for i in range(count)]
    devices = tuple(
        ClusterDevice(
            name,
            random.choice((1, 2, 4, 8)) * 10**9,
            round(2 ** random.uniform(0, 3), 3),
            holder=name == names[0],
        )
        for name in names
    )
    fast = random.sample(names, max(2, count // 10))
    links = {
        (one, other): ClusterLink(125e6, 0.0005) for one in fast for other in fast if one != other
    }
    return Cluster(devices, ClusterLink(12.5e6, 0.002), links)


def unlike(name: str, units: int, devices: int, batch_size: int) -> Question:
    """A random model on devices of all kinds."""
    profile, _ = household(devices, units, devices=2)
    return Question(name, profile, unlike_devices(devices, seed=devices), batch_size)


def efficientnet() -> Question:
    """Times by the units' flops."""
    name = "efficientnet-b1"
    known = model(name, by_flops(name), flops_of_resnet50=1.0)
    devices = cluster(known, ENVIRONMENTS["C"], 100)
    return Question("efficientnet", known.profile, devices, known.batch_size)


QUESTIONS: Mapping[str, Callable[[], Question]] = {
    "efficientnet": efficientnet,
    "sixty-four": lambda: Question(
        "sixty-four", household(64, 64, 2)[0], unlike_devices(64, seed=64), 512
    ),
    "thousand": lambda: Question(
        "thousand", household(1000, 24, 2)[0], unlike_devices(1000, seed=1000), 1024
    ),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One process: processor seconds, and the plan it printed (None = it said there is none)."""

    seconds: float
    plan: dict[str, Any] | None


def run(arguments: Sequence[str]) -> Run:
    """`p2ptrain plan` with these arguments, on the core this process is bound to."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "p2ptrain", "plan", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    answered = done.returncode == 0 and "--help" not in arguments
    return Run(seconds, json.loads(done.stdout) if answered else None)


def measure(question: Question, folder: Path, rounds: int) -> str:
    """A line of the table."""
    profile, cluster = folder / f"{question.name}.profile.json", folder / f"{question.name}.json"
    profile.write_text(json.dumps(question.profile.to_json()))
    cluster.write_text(json.dumps(question.cluster.to_json()))
    common = ["--profile", str(profile), "--cluster", str(cluster), "--json"]
    common += ["--batch-size", str(question.batch_size)]
    auto, helps = [], []
    for _ in range(rounds):
        auto.append(run(common))
        helps.append(run(["--help"]))
    took, helped = (statistics.median(r.seconds for r in runs) for runs in (auto, helps))
    rates = {name: _rate(run([*common, "--planner", name])) for name in PLANNERS[1:]}
    best = _rate(auto[0])
    ratios = " ".join(f"{best / rate:8.2f}" if rate else f"{'-':>8}" for rate in rates.values())
    return f"{question.name:14}{took:9.2f}{helped:8.2f}{took - helped:12.2f}{best:12.1f} {ratios}"


def _rate(done: Run) -> float:
    return float(done.plan["predicted"]["samples_per_s"]) if done.plan else 0.0


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=list(QUESTIONS))
    parser.add_argument("--keep", type=Path, help="write the profiles and clusters here")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(
        f"{'question':14}{'seconds':>9}{'--help':>8}{'difference':>12}{'samples/s':>12} "
        + " ".join(f"{'/ ' + name:>8}" for name in PLANNERS[1:])
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.only or QUESTIONS:
            print(measure(QUESTIONS[name](), folder, options.rounds), flush=True)


if __name__ == "__main__":
    main()
