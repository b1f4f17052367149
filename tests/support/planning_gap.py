"""How far `auto` stays behind exhaustive search, and how long it plans; not a test.

    python -m tests.support.planning_gap 100  # 100 questions of 8 units, 4 devices
    python -m tests.support.planning_gap 200 --units 5 --devices 3 --free
    python -m tests.support.planning_gap 100 --private --first 500

Gaps are (auto - best) / best; below zero where the search's own changes found more than the oracle.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace
from random import Random

from p2ptrain.errors import PlanError
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterLink
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support.exhaustive_planner import best_round_seconds
from tests.support.planning_examples import household


@dataclass(frozen=True)
class Problem:
    """A random question with everything that makes planning hard."""

    profile: Profile
    cluster: Cluster
    batch_size: int
    micro_batch: int


def problem(seed: int, units: int, devices: int) -> Problem:
    """Unequal devices, some with own times or little memory; holder anywhere; ragged batches."""
    random = Random(seed)
    profile, cluster = household(seed, units, devices)
    holder = random.randrange(devices)
    batch_size = random.choice((16, 24, 32, 50, 64))
    micro_batch = random.choice((1, 2, 3, 4, 8, 16))
    whole = sum(3 * unit.parameter_bytes for unit in profile.units)
    whole += sum(unit.activation_bytes for unit in profile.units) * micro_batch
    tight = random.random() < 0.4
    members = []
    for i, device in enumerate(cluster.devices):
        memory = int(whole * random.uniform(0.3, 3.0)) if tight else device.memory_bytes
        own = _own_times(random, profile) if random.random() < 0.25 else None
        members.append(replace(device, holder=i == holder, memory_bytes=memory, times=own))
    slow = random.random() < 0.3
    links = {
        pair: ClusterLink(
            link.bytes_per_s, random.choice((0.002, 0.005, 0.02)) if slow else link.latency_s
        )
        for pair, link in cluster.links.items()
    }
    return Problem(
        profile, replace(cluster, devices=tuple(members), links=links), batch_size, micro_batch
    )


def _own_times(random: Random, profile: Profile) -> TimeTable:
    """A device whose units are not all slower by the same factor."""
    factors = [random.uniform(0.7, 4.0) for _ in profile.units]
    return TimeTable(
        profile.times.sizes,
        tuple(
            UnitTimes(
                tuple(t * f for t, f in zip(entry.forward, factors, strict=True)),
                tuple(t * f for t, f in zip(entry.backward, factors, strict=True)),
            )
            for entry in profile.times.times
        ),
    )


@dataclass(frozen=True)
class Gap:
    """Of one question; `seconds` of processor time for the plan."""

    seed: int
    gap: float
    seconds: float


def gap(seed: int, options: argparse.Namespace) -> Gap | None:
    """None where nothing fits, and `auto` says so too."""
    asked = problem(seed, options.units, options.devices)
    cost = CostModel(asked.profile, asked.cluster)
    sizes = _sizes(asked.batch_size) if options.free else [asked.micro_batch]
    best = min(
        best_round_seconds(
            cost,
            BatchSplit(asked.batch_size, size),
            private=options.private,
            groups=not options.straight,
            climbed=options.climbed,
        )[0]
        for size in sizes
    )
    request = PlanRequest(
        asked.batch_size,
        None if options.free else asked.micro_batch,
        private=options.private,
        groups=not options.straight,
    )
    start = time.process_time()
    try:
        plan = make_plan(asked.profile, asked.cluster, request)
    except PlanError:
        if best < float("inf"):
            return Gap(seed, float("inf"), 0.0)
        return None
    seconds = time.process_time() - start
    return Gap(seed, plan.predicted.round_seconds / best - 1, seconds)


def _sizes(batch_size: int) -> list[int]:
    """Powers of two, and the smallest sizes that make 1 to 8 micro-batches."""
    powers = {2**i for i in range(batch_size.bit_length())}
    return sorted(powers | {-(-batch_size // count) for count in range(1, 9)})


def main() -> None:
    """Write the figures to stdout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("questions", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--climbed", type=int, default=12)
    for flag in ("--private", "--free", "--straight"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.questions)
    found = [one for one in (gap(seed, options) for seed in seeds) if one is not None]
    found.sort(key=lambda one: one.gap)
    gaps = [one.gap for one in found]
    times = sorted(one.seconds for one in found)
    worst = ", ".join(f"{one.seed}: {one.gap:.2%}" for one in found[-4:])
    sys.stdout.write(
        f"{len(found)} questions: median {statistics.median(gaps):.2%}, "
        f"95% below {gaps[int(len(gaps) * 0.95)]:.2%}, worst {gaps[-1]:.2%}, "
        f"over 2%: {sum(one > 0.02 for one in gaps)} ({worst}); planning median "
        f"{statistics.median(times):.3f} s, worst {times[-1]:.3f} s\n"
    )


if __name__ == "__main__":
    main()
