"""Other systems' ways of dividing a model, for comparisons by our simulator.

None of them is part of the product, and none knows the data holder's feed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup, draft_groups, draft_pipeline, peak_bytes
from p2ptrain.plan.simulation.simulate import draft_of, simulate_draft
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan

ENDLESS_BYTES = 10**15


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a baseline reaches; None where it does not fit in memory."""

    samples_per_s: float | None
    draft: Draft | None = None


def replicated_pipeline(cost: CostModel, split: BatchSplit, replicas: Sequence[int]) -> Outcome:
    """Stages of so many devices (in order of their names), whole micro-batches dealt in turn.

    The borders first make the slowest stage or link as fast as possible (PipeDream's recursion
    with given replicas), then move one unit at a time while the simulator says faster.
    """
    groups = dealing_groups(split, replicas)

    def speed(borders: Sequence[int]) -> float:
        return outcome(cost, draft_groups(cost, split, borders, groups)).samples_per_s or 0.0

    borders = climb(balanced_borders(cost, split, replicas), speed)
    return outcome(cost, draft_groups(cost, split, borders, groups))


def outcome(cost: CostModel, draft: Draft | None) -> Outcome:
    """The draft's speed, a round's or steady running's as the cost model says."""
    if draft is None or not fits(cost, draft):
        return Outcome(None)
    return Outcome(simulate_draft(cost, draft).samples_per_s, draft)


def dealing_groups(split: BatchSplit, replicas: Sequence[int]) -> list[StageGroup]:
    """Groups of devices 0, 1, ... that deal whole micro-batches as evenly as they come."""
    groups, first = [], 0
    for count in replicas:
        devices = tuple(range(first, first + count))
        first += count
        if count == 1:
            groups.append(StageGroup(devices, (split.micro_batch,)))
            continue
        share, more = divmod(split.micro_batches, count)
        shares = tuple(share + (place < more) for place in range(count))
        used = [place for place in range(count) if shares[place]]
        groups.append(
            StageGroup(
                tuple(devices[place] for place in used),
                tuple(shares[place] for place in used),
                Allocation.MICRO_BATCHES,
            )
        )
    return groups


def balanced_borders(
    cost: CostModel, split: BatchSplit, replicas: Sequence[int], reference: int = 0
) -> list[int]:
    """Borders that minimise the slowest stage (its time over its replicas) or link.

    O(stages · units²), on the times of the device `reference`.
    """
    count, samples = cost.unit_count, split.first_samples
    rate = cost.link(0, len(cost.devices) - 1).bytes_per_s

    def stage(first: int, end: int, p: int) -> float:
        return sum(cost.stage_seconds(reference, first, end, samples)) / replicas[p]

    def link(cut: int, p: int) -> float:
        return cost.cut_bytes(cut) * samples / rate / min(replicas[p - 1], replicas[p])

    best: list[dict[int, tuple[float, int]]] = [
        {end: (stage(0, end, 0), 0) for end in range(1, count + 1)}
    ]
    for p in range(1, len(replicas)):
        best.append(
            {
                end: min(
                    (max(best[-1][cut][0], link(cut, p), stage(cut, end, p)), cut)
                    for cut in range(p, end)
                )
                for end in range(p + 1, count + 1)
            }
        )
    borders = [count]
    for p in reversed(range(len(replicas))):
        borders.append(best[p][borders[-1]][1])
    return borders[::-1]


def climb(borders: list[int], speed: Callable[[Sequence[int]], float]) -> list[int]:
    """Move borders, one at a time by up to four units, while that is faster."""
    best = speed(borders)
    moved = True
    while moved:
        moved = False
        for other in list(_moves(borders)):
            reached = speed(other)
            if reached > best:
                borders, best, moved = other, reached, True
                break
    return borders


def _moves(borders: Sequence[int]) -> Iterator[list[int]]:
    for i in range(1, len(borders) - 1):
        for step in (-1, 1, -2, 2, -4, 4):
            other = list(borders)
            other[i] += step
            if all(a < b for a, b in pairwise(other)):
                yield other


def fits(cost: CostModel, draft: Draft) -> bool:
    """Whether every device has the memory."""
    peaks = peak_bytes(cost, draft)
    return all(peak <= cost.devices[device].memory_bytes for device, peak in peaks.items())


def dapple_like(profile: Profile, cluster: Cluster, request: PlanRequest) -> Outcome:
    """DAPPLE (PPoPP 2021): hybrid pipelines planned for equal devices that never lack memory.

    Asteroid's planner on a cluster of as many devices, all of the mean speed and with endless
    memory; the groups and shares that come out are then timed on the real devices. What needs more
    memory than there is, does not fit.
    """
    mean = sum(1 / device.slowdown for device in cluster.devices) / len(cluster.devices)
    equal = tuple(
        replace(device, slowdown=1 / mean, memory_bytes=ENDLESS_BYTES) for device in cluster.devices
    )
    plan = make_plan(profile, replace(cluster, devices=equal), replace(request, planner="hybrid"))
    cost = CostModel(profile, cluster)
    return outcome(cost, draft_of(plan, cost))


def equal_stages(
    cost: CostModel, split: BatchSplit, order: Sequence[int], reference: int
) -> Outcome:
    """PipeDream's straight partition on `order`: planned as if all devices were `reference`."""
    borders = balanced_borders(cost, split, (1,) * len(order), reference)
    return outcome(cost, draft_pipeline(cost, split, borders, order))
