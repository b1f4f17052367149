"""Processor time that planning takes on three questions, and how good the plans are.

    python tools/planning_time.py [--rounds 3] [--only NAME]... [--keep FOLDER]

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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.profile import Profile, Unit
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from tools.paper_testbeds import ENVIRONMENTS, by_flops, cluster, model

PLANNERS = ("auto", "single", "pp", "dp", "hybrid")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FLOPS_PER_S = 25e9
"""Of the reference device, a fast core."""
BYTES_PER_S = 8e9
"""Of the reference device's memory: what bounds activations and normalisations."""
CALL_SECONDS = 20e-6
"""What starting a unit costs, whatever the batch."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a unit does for one sample; all but `parameters` in numbers of floats."""

    name: str
    flops: float
    parameters: int
    output: int
    crossing: int


@dataclass(frozen=True, slots=True)
class Question:
    """One planning question; the first device of the cluster is the holder."""

    name: str
    profile: Profile
    cluster: Cluster
    batch_size: int


def profile_of(model: str, works: Sequence[Work], input_bytes: int) -> Profile:
    """Times from flops and memory traffic, backward twice the forward."""
    units = tuple(
        Unit(work.name, 4 * work.parameters, 4 * work.crossing, 4 * work.output, int(work.flops))
        for work in works
    )
    return Profile(model, input_bytes, 8, units, 1.0, _times(works))


def _times(works: Sequence[Work]) -> TimeTable:
    def seconds(work: Work, samples: int) -> float:
        each = max(work.flops / FLOPS_PER_S, 8 * work.output / BYTES_PER_S)
        return CALL_SECONDS + samples * each

    times = []
    for size in SIZES:
        forward = tuple(seconds(work, size) for work in works)
        times.append(UnitTimes(forward, tuple(2 * value for value in forward)))
    return TimeTable(SIZES, tuple(times))


def transformer(blocks: int, width: int, tokens: int) -> Profile:
    """Two units a block: attention and feed-forward."""
    floats = width * tokens
    works = []
    for block in range(blocks):
        attention = 8 * width**2 * tokens + 4 * width * tokens**2
        works.append(Work(f"{block}.attention", attention, 4 * width**2, 6 * floats, floats))
        works.append(Work(f"{block}.mlp", 16 * width**2 * tokens, 8 * width**2, 9 * floats, floats))
    return profile_of(f"transformer-{blocks}x{width}", works, input_bytes=8 * tokens)


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


def efficientnet() -> Question:
    """Times by the units' flops."""
    name = "efficientnet-b1"
    known = model(name, by_flops(name), flops_of_resnet50=1.0)
    devices = cluster(known, ENVIRONMENTS["C"], 100)
    return Question("efficientnet", known.profile, devices, known.batch_size)


QUESTIONS: Mapping[str, Callable[[], Question]] = {
    "efficientnet": efficientnet,
    "sixty-four": lambda: Question(
        "sixty-four", transformer(32, 512, 64), unlike_devices(64, seed=64), 512
    ),
    "thousand": lambda: Question(
        "thousand", transformer(12, 768, 128), unlike_devices(1000, seed=1000), 1024
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
