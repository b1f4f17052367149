"""What a round of a plan with tiles has each of its devices do, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import StageGroup, message_seconds, place_seconds
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.plan import Plan
from p2ptrain.tiling.planning.tiled_pipeline import sum_seconds, tile_parts
from p2ptrain.tiling.planning.tiled_plan import costs_of, row_of
from p2ptrain.tiling.planning.tiling_simulation import simulate_tiles


@dataclass(frozen=True, slots=True)
class StageWork:
    """Seconds of one device in one stage.

    Attributes:
        computing: forwards, backwards and the update.
        messages: what goes between tiles, and to and from other stages.
    """

    computing: float
    messages: float


def round_work(cost: CostModel, plan: Plan) -> Mapping[tuple[int, int], StageWork]:
    """By stage and device. Raises PlanError, as `tiled_plan.round_of`."""
    costs, devices, _, borders = costs_of(cost, plan)
    pieces = sum(tile_parts(plan.split))
    groups = [costs.group(*units) for units in pairwise(borders)]
    exchanges = [e for g in groups if g is not None for e in (g.halo, *g.statistics)]
    computing = simulate_tiles(costs, borders).computing
    found: dict[tuple[int, int], StageWork] = {}
    for place, device in enumerate(devices):
        statistics_seconds = 2 * sum(
            costs.device_seconds(exchange, place) for exchange in exchanges
        )
        update = cost.update_seconds(device, 0, borders[-1])
        found[0, device] = StageWork(
            pieces * computing[place] + update, pieces * statistics_seconds + costs.filter_seconds
        )
    for p, (group, units) in enumerate(row_of(cost, plan).stages, 1):
        for place, device in enumerate(group.devices):
            found[p, device] = _behind(cost, plan.split, group, place, units)
    return found


def _behind(
    cost: CostModel, split: BatchSplit, group: StageGroup, place: int, units: tuple[int, int]
) -> StageWork:
    """Of one of the devices of a stage behind the tiles."""
    messages = message_seconds(cost, split, group, place, units)
    computing = place_seconds(cost, split, group, place, units) - messages
    if len(group.devices) > 1:
        messages += sum_seconds(cost, group, *units)
    return StageWork(computing + cost.update_seconds(group.devices[place], *units), messages)
