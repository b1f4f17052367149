"""How far `auto` stays behind every straight pipeline, and how long it plans; not a test.

    python -m tests.unit.plan.gap 200 8 4            # 200 questions of up to 8 units, 4 devices
    python -m tests.unit.plan.gap 100 7 4 --private --searched   # never enumerate

Gaps are (auto - best) / best over rounds with usual depths; below zero where deeper ones won.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from random import Random

from p2ptrain.plan import straight
from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.planners import make_plan
from p2ptrain.plan.request import PlanRequest
from p2ptrain.plan.split import BatchSplit
from tests.unit.plan.examples import household
from tests.unit.plan.exhaustive import best_round_seconds


def gap(seed: int, units: int, devices: int, private: bool) -> float:
    """Of one random question with a fixed micro-batch."""
    random = Random(seed)
    count, members = random.randint(2, units), random.randint(2, devices)
    profile, cluster = household(seed, count, members)
    batch_size, micro_batch = random.choice((16, 32, 64, 100)), random.choice((1, 2, 4, 8, 16))
    split = BatchSplit(batch_size, micro_batch)
    best, _ = best_round_seconds(CostModel(profile, cluster), split, private=private)
    plan = make_plan(profile, cluster, PlanRequest(batch_size, micro_batch, private=private))
    return plan.predicted.round_seconds / best - 1


def planning_seconds(units: int, devices: int) -> float:
    """Processor time of one plan with a free micro-batch size and a batch of 512, median of 5."""
    times = []
    for seed in range(5):
        profile, cluster = household(seed, units, devices)
        start = time.process_time()
        make_plan(profile, cluster, PlanRequest(512))
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    """Write the figures to stdout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("questions", type=int)
    parser.add_argument("units", type=int)
    parser.add_argument("devices", type=int)
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--searched", action="store_true")
    options = parser.parse_args()
    if options.searched:
        straight.MOST_ENUMERATED = 0
    gaps = sorted(
        gap(seed, options.units, options.devices, options.private)
        for seed in range(options.questions)
    )
    over = sum(one > 0.02 for one in gaps)
    sys.stdout.write(
        f"{len(gaps)} questions: median {statistics.median(gaps):.2%}, "
        f"95% below {gaps[int(len(gaps) * 0.95)]:.2%}, worst {gaps[-1]:.2%}, over 2%: {over}\n"
    )
    for devices in (5, 8, 64):
        seconds = planning_seconds(64, devices)
        sys.stdout.write(f"64 units, {devices} devices: {seconds:.3f} s\n")


if __name__ == "__main__":
    main()
