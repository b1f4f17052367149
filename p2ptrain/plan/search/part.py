"""The devices of a stage before it is known which units it has, and how they would share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.plan.allocation import Allocation
from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.draft import Group, alone
from p2ptrain.plan.search.balanced import balanced_group
from p2ptrain.plan.split import BatchSplit


@dataclass(frozen=True, slots=True)
class Part:
    """Devices of one stage, in the order of their sample ranges."""

    devices: tuple[int, ...]
    allocation: Allocation = Allocation.SAMPLES


def shared_by_speed(cost: CostModel, split: BatchSplit, part: Part) -> Group | None:
    """Shares in proportion to speed on the whole model, whatever memory says.

    None where there are more devices than there is to share.
    """
    if len(part.devices) == 1:
        return alone(split, part.devices[0])
    deals = part.allocation is Allocation.MICRO_BATCHES
    total = split.micro_batches if deals else split.micro_batch
    if total < len(part.devices):
        return None
    whole = (0, cost.unit_count, split.first_samples)
    speeds = [1 / max(sum(cost.stage_seconds(d, *whole)), 1e-300) for d in part.devices]
    return Group(part.devices, _proportional(speeds, total), part.allocation)


def balanced(
    cost: CostModel, split: BatchSplit, part: Part, units: tuple[int, int], depth: int
) -> Group | None:
    """Shares for those units within memory, at the depth wanted or at a depth of one."""
    group = balanced_group(cost, split, units, part.devices, part.allocation, depth)
    return group or balanced_group(cost, split, units, part.devices, part.allocation)


def _proportional(speeds: Sequence[float], total: int) -> tuple[int, ...]:
    """Whole shares of at least 1 that sum to `total`; the largest remainders are rounded up."""
    spare = total - len(speeds)
    exact = [spare * speed / sum(speeds) for speed in speeds]
    shares = [1 + int(part) for part in exact]
    by_rest = sorted(range(len(speeds)), key=lambda i: (int(exact[i]) - exact[i], i))
    for i in by_rest[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)
