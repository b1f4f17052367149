"""What a round of a plan with tiles has each of its devices do, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.plan import Plan
from p2ptrain.plan.tiling.row import stage_seconds, tile_parts
from p2ptrain.plan.tiling.simulate import simulate
from p2ptrain.plan.tiling.tiled_plan import costs_of


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one device in one stage.

    Attributes:
        computing: forwards, backwards and the update.
        messages: what goes between tiles, and to and from other stages.
    """

    computing: float
    messages: float


def round_work(cost: CostModel, plan: Plan) -> Mapping[tuple[int, int], Work]:
    """By stage and device. Raises PlanError, as `tiled_plan.round_of`."""
    costs, devices = costs_of(cost, plan)
    first, *behind = plan.stages
    assert first.tiling is not None
    borders, pieces = first.tiling.borders, sum(tile_parts(plan.split))
    groups = [costs.group(*units) for units in pairwise(borders)]
    exchanges = [e for g in groups if g is not None for e in (g.halo, *g.statistics)]
    computing = simulate(costs, borders).computing
    found: dict[tuple[int, int], Work] = {}
    for place, device in enumerate(devices):
        told = 2 * sum(costs.device_seconds(exchange, place) for exchange in exchanges)
        update = cost.update_seconds(device, 0, borders[-1])
        found[0, device] = Work(
            pieces * computing[place] + update, pieces * told + costs.filter_seconds
        )
    split = plan.split
    for p, stage in enumerate(behind, 1):
        device, (begin, end) = cost.index(stage.devices[0].name), stage.units
        whole, alone = stage_seconds(cost, split, device, begin, end), 0.0
        full, last = (cost.unit_times(device, n) for n in (split.first_samples, split.last_samples))
        for count, times in ((split.micro_batches - 1, full), (1, last)):
            alone += count * (sum(times.forward[begin:end]) + sum(times.backward[begin:end]))
        update = cost.update_seconds(device, begin, end)
        found[p, device] = Work(alone + update, whole - alone)
    return found
