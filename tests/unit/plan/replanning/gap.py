"""How the light re-plan compares with planning from zero, and what it costs; not a test.

    python -m tests.unit.plan.replanning.gap 200     # households of up to 64 units, 8 devices
    python -m tests.unit.plan.replanning.gap 50 --units 24 --devices 64
    python -m tests.unit.plan.replanning.gap 100 --straight --private

Each question plans a random household, then lets something happen (a device dies, two die, one is
slowed to a quarter, a link falls to a tenth, a device joins) and compares throughput, processor
time and bytes of the light re-plan with `auto` from zero. A pause is planning and moving: of the
light one, and of `--recovery heavy` (gather at the holder, which has a copy of everything here,
plan from zero, redistribute).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from p2ptrain.errors import PlanError
from p2ptrain.plan.cluster import Cluster, Link
from p2ptrain.plan.plan import LeftOut, Plan
from p2ptrain.plan.planners import make_plan
from p2ptrain.plan.profile import Profile
from p2ptrain.plan.replanning.heavy import heavy
from p2ptrain.plan.replanning.light import THOROUGH, Effort
from p2ptrain.plan.replanning.migration import plan_migration
from p2ptrain.plan.replanning.replan import living, replan
from p2ptrain.plan.replanning.replicas import place_replicas
from p2ptrain.plan.request import PlanRequest
from tests.unit.plan.examples import household

EVENTS = ("death", "two deaths", "slowed", "slow link", "join")


@dataclass(frozen=True, slots=True)
class Compared:
    """One event.

    Attributes:
        throughput: the light plan's over the one from zero.
        seconds: processor time of the light re-plan; of planning from zero in `zero_seconds`.
        moved: bytes of the light migration; of the plan from zero in `zero_moved`.
        pause: seconds of planning and moving; of the heavy re-plan in `heavy_pause`.
    """

    event: str
    throughput: float
    seconds: float
    zero_seconds: float
    moved: int
    zero_moved: int
    pause: float
    heavy_pause: float


def happened(
    random: Random, event: str, profile: Profile, cluster: Cluster, request: PlanRequest
) -> tuple[Plan, Cluster]:
    """A plan from before the event, and the cluster after it."""
    if event == "join":
        joined = random.choice([d.name for d in cluster.devices if not d.holder])
        before = living(cluster, [joined])
        plan = make_plan(profile, before, request)
        left_out = (*plan.left_out, LeftOut(joined, "new"))
        return replace(plan, left_out=left_out), cluster
    plan = make_plan(profile, cluster, request)
    used = [d.name for stage in plan.stages for d in stage.devices]
    others = sorted({name for name in used if name != cluster.holder.name})
    others = others or [d.name for d in cluster.devices if not d.holder]
    if event in ("death", "two deaths"):
        dead = random.sample(others, min(len(others), 1 if event == "death" else 2))
        return plan, living(cluster, dead)
    name = random.choice(others)
    if event == "slowed":
        slowed = tuple(
            replace(d, slowdown=d.slowdown * 4) if d.name == name else d for d in cluster.devices
        )
        return plan, replace(cluster, devices=slowed)
    links = dict(cluster.links)
    for other in cluster.devices:
        if other.name != name:
            for pair in ((name, other.name), (other.name, name)):
                link = cluster.link(*pair)
                links[pair] = Link(link.bytes_per_s / 10, link.latency_s)
    return plan, replace(cluster, links=links)


def compare(seed: int, options: argparse.Namespace) -> Compared | None:
    """One random question; None where nothing fits or a unit is lost."""
    random = Random(seed)
    low = 2 if options.devices < 16 else options.devices - 1
    units = random.randint(min(8, options.units), options.units)
    profile, cluster = household(seed, units, random.randint(low + 1, options.devices))
    size = random.choice((4, 8, 16))
    request = PlanRequest(32 * size, size, private=options.private, groups=not options.straight)
    event = EVENTS[seed % len(EVENTS)]
    plan, after = happened(random, event, profile, cluster, request)
    effort = THOROUGH if options.thorough else None
    try:
        return _compared(event, plan, (profile, after, request), effort)
    except PlanError:
        return None


def _compared(
    event: str,
    plan: Plan,
    question: tuple[Profile, Cluster, PlanRequest],
    effort: Effort | None,
) -> Compared:
    profile, after, request = question
    held = place_replicas(plan, global_at=after.holder.name)
    start = time.process_time()
    light = replan(profile, after, plan, request, replicas=held, effort=effort)
    middle = time.process_time()
    whole = heavy(profile, after, plan, request, replicas=held)
    end = time.process_time()
    zero = whole.plan
    return Compared(
        event,
        light.plan.predicted.samples_per_s / zero.predicted.samples_per_s,
        middle - start,
        end - middle,
        light.migration.size_bytes,
        plan_migration(profile, after, plan, held, zero).size_bytes,
        middle - start + light.migration.seconds,
        end - middle + whole.seconds,
    )


def _line(name: str, found: Sequence[Compared]) -> str:
    ratios = sorted(one.throughput for one in found)
    seconds = sorted(one.seconds for one in found)
    good = sum(ratio >= 0.95 for ratio in ratios) / len(ratios)
    moved = sum(one.moved for one in found) / max(1, sum(one.zero_moved for one in found))
    pauses = [statistics.median(one.pause for one in found)]
    pauses += [statistics.median(one.heavy_pause for one in found)]
    return (
        f"{name:11} n {len(found):4}  throughput: median {statistics.median(ratios):.3f}  "
        f"p5 {ratios[int(0.05 * len(ratios))]:.3f}  min {ratios[0]:.3f}  >= 0.95: {good:.1%}  "
        f"bytes {moved:.2f}  ms: median {statistics.median(seconds) * 1e3:.1f}  "
        f"p95 {seconds[int(0.95 * len(seconds))] * 1e3:.1f}  max {seconds[-1] * 1e3:.1f}  "
        f"pause s: light {pauses[0]:.3g} heavy {pauses[1]:.3g}\n"
    )


def main() -> None:
    """Write one line an event and one for all to stdout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("questions", type=int)
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--straight", action="store_true", help="no groups")
    parser.add_argument("--thorough", action="store_true", help="more effort than 20 ms allow")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.questions)
    compared = [compare(seed, options) for seed in seeds]
    found = [one for one in compared if one is not None]
    for event in EVENTS:
        some = [one for one in found if one.event == event]
        if some:
            sys.stdout.write(_line(event, some))
    sys.stdout.write(_line("all", found))


if __name__ == "__main__":
    main()
