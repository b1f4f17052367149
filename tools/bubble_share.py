"""How much of a round equal devices wait, in 1F1B and with split backwards.

    python tools/bubble_share.py [--profile P.json] [--batch-size 64]

A straight pipeline over 3 and over 5 equal devices (planner pp), 8 micro-batches, links free or of
100 Mbit/s, by the plain cost model (one round alone) and as the runtime runs (updates wait for the
last stage, messages cost time, splitting costs 3%). Bubble: the part of the round that devices do
not compute, on average. Without a profile: 15 equal blocks, forward : inputs : weights = 1 : 1 : 1
as in section 2 of "Zero Bubble Pipeline Parallelism" (Qi et al. 2023), what crosses a cut as large
as in a vision transformer of 64 tokens and 192 channels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from p2ptrain.plan.cluster import Cluster, Device, Link
from p2ptrain.plan.plan import Plan
from p2ptrain.plan.planners import make_plan
from p2ptrain.plan.profile import Profile, Unit
from p2ptrain.plan.request import PlanRequest, Schedule
from p2ptrain.plan.simulation.simulate import simulate
from p2ptrain.plan.times import TimeTable, UnitTimes

MICRO_BATCHES = 8
DEVICES = (3, 5)
LINKS = {"free": Link(1e15, 0.0), "100 Mbit/s": Link(12.5e6, 0.0005)}
MEMORY_BYTES = 8 * 10**9
BLOCKS, BLOCK_SECONDS = 15, 0.02
TOKENS, CHANNELS = 64, 192


def blocks(samples: int) -> Profile:
    """Equal blocks that take BLOCK_SECONDS for each of their three parts of so many samples."""
    floats = TOKENS * CHANNELS
    units = tuple(
        Unit(f"block{i}", 48 * CHANNELS**2, 4 * floats, 16 * 4 * floats) for i in range(BLOCKS)
    )
    each = (BLOCK_SECONDS,) * BLOCKS
    times = UnitTimes(each, tuple(2 * seconds for seconds in each), each)
    return Profile("blocks", 4 * floats, 8, units, 1.0, TimeTable((samples,), (times,)))


def rows(profile: Profile, batch_size: int) -> Iterator[tuple[str, ...]]:
    """A line a setting: bubble in 1F1B, bubble split, the round's seconds in both."""
    for overlap in (False, True):
        for count in DEVICES:
            for name, link in LINKS.items():
                cluster = equal_devices(count, link)
                found = [
                    bubble(profile, cluster, plan, overlap=overlap)
                    for plan in plans(profile, cluster, batch_size, overlap=overlap)
                ]
                (whole, whole_seconds), (split, split_seconds) = found
                yield (
                    "runtime" if overlap else "plain",
                    str(count),
                    name,
                    f"{whole:.1%}",
                    f"{split:.1%}",
                    f"{whole_seconds:.3f}",
                    f"{split_seconds:.3f}",
                    f"{whole_seconds / split_seconds:.3f}",
                )


def equal_devices(count: int, link: Link) -> Cluster:
    """The first one is the holder."""
    devices = (Device(f"device{i}", MEMORY_BYTES, holder=i == 0) for i in range(count))
    return Cluster(tuple(devices), link)


def plans(profile: Profile, cluster: Cluster, batch_size: int, *, overlap: bool) -> Iterator[Plan]:
    """The same pipeline in 1F1B and split."""
    for schedule in (Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE):
        request = PlanRequest(
            batch_size,
            micro_batch=batch_size // MICRO_BATCHES,
            planner="pp",
            overlap=overlap,
            schedule=schedule,
        )
        yield make_plan(profile, cluster, request)


def bubble(profile: Profile, cluster: Cluster, plan: Plan, *, overlap: bool) -> tuple[float, float]:
    """(mean part of the round that devices wait, seconds of the round)."""
    simulation = simulate(plan, profile, cluster, timeline=False, overlap=overlap)
    share = simulation.busy_share
    return 1 - sum(share.values()) / len(share), simulation.round_seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--profile", type=Path, help="p2ptrain.profile/1 with times of weights")
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    profile = blocks(options.batch_size // MICRO_BATCHES)
    if options.profile is not None:
        profile = Profile.from_json(json.loads(options.profile.read_text()))
    heads = ("model", "devices", "links", "1F1B", "split", "1F1B s", "split s", "faster")
    for row in (heads, tuple("---" for _ in heads), *rows(profile, options.batch_size)):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
