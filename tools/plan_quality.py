"""Seconds of the rounds that `auto` plans on seeded questions, to compare two states of the code.

    python -m tools.plan_quality --out before.json
    python -m tools.plan_quality --against before.json

    small    40 questions of 4 to 12 units on 2 to 5 devices, free or fixed micro-batches, a third
             private: own times, little memory, slow links (`tests/support/planning_gap.py`)
    large    12 questions of 12 to 64 units on 6 to 16 unlike devices
    equal    8 questions of 12 units, parameters at the end as in VGG-16, on 7 to 16 equal devices,
             synchronous and asynchronous

Speeds compared are before / after: above 1 the plan became faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from p2ptrain.errors import PlanError
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support.equal_devices import equal, vgg_like
from tests.support.planning_examples import household
from tests.support.planning_gap import problem


def questions() -> Iterator[tuple[str, Profile, Cluster, PlanRequest]]:
    """Every question with its name; the part before the dash is its kind."""
    for seed in range(40):
        asked = problem(seed, units=4 + seed % 9, devices=2 + seed % 4)
        micro_batch = None if seed % 2 else asked.micro_batch
        request = PlanRequest(asked.batch_size, micro_batch, private=seed % 3 == 0)
        yield f"small-{seed}", asked.profile, asked.cluster, request
    for seed in range(12):
        profile, cluster = household(100 + seed, units=12 + 5 * seed, devices=6 + seed)
        yield f"large-{seed}", profile, cluster, PlanRequest(64, None if seed % 2 else 8)
    for mode in (PlanMode.SYNC, PlanMode.ASYNC):
        for devices in (7, 8, 12, 16):
            batch_size = 1 if mode is PlanMode.ASYNC else devices
            yield (
                f"equal-{mode.value}-{devices}",
                vgg_like(),
                equal(devices),
                PlanRequest(batch_size, mode=mode),
            )


def round_seconds(profile: Profile, cluster: Cluster, request: PlanRequest) -> float | None:
    """Of the plan; None where there is none. Asynchronously of a mini-batch."""
    try:
        predicted = make_plan(profile, cluster, request).predicted
    except PlanError:
        return None
    return 1 / predicted.samples_per_s


def compared(before: dict[str, float | None], after: dict[str, float | None]) -> Iterator[str]:
    """A line a kind, and the questions that lose most."""
    ratios: dict[str, dict[str, float]] = {}
    for name, seconds in after.items():
        old = before[name]
        if (old is None) != (seconds is None):
            yield f"{name}: a plan was found {'only before' if seconds is None else 'only now'}"
        elif old is not None and seconds is not None:
            ratios.setdefault(name.split("-")[0], {})[name] = old / seconds
    for kind, found in ratios.items():
        worst = sorted(found, key=lambda name: found[name])[:3]
        named = ", ".join(f"{name} {found[name]:.3f}" for name in worst)
        mean = statistics.mean(found.values())
        yield f"{kind}: minimum {min(found.values()):.4f}, mean {mean:.4f} ({named})"


def main() -> None:
    """Plan every question; write or compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--kind", choices=("small", "large", "equal"), help="only these")
    options = parser.parse_args()
    start = time.process_time()
    after = {
        name: round_seconds(*question)
        for name, *question in questions()
        if options.kind is None or name.startswith(options.kind)
    }
    sys.stdout.write(f"{len(after)} questions, {time.process_time() - start:.1f} s of processor\n")
    if options.out is not None:
        options.out.write_text(json.dumps(after, indent=1))
    if options.against is not None:
        for line in compared(json.loads(options.against.read_text()), after):
            sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
