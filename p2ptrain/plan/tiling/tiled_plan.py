"""Plans whose first stage is tiled.

The rest is behind it on one of its devices: a round is then one micro-batch after another,
forward through the tiles and what follows, and back; then the sum of the filters' gradients and the
update, so that nobody waits longer for a device with both. Or the rest is a pipeline of devices
without tiles, which work on one micro-batch while the tiles are at the next (`pipelined.py`).
What either takes is what `row.py` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf
from typing import NamedTuple

from p2ptrain.errors import PlanError
from p2ptrain.plan.allocation import Allocation
from p2ptrain.plan.check import check_plan
from p2ptrain.plan.cluster import Cluster
from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.plan import DeviceShare, LeftOut, Plan, PlannedStage, Predicted
from p2ptrain.plan.profile import Profile
from p2ptrain.plan.request import Mode, PlanRequest
from p2ptrain.plan.shared.micro_batches import candidate_splits
from p2ptrain.plan.simulation.simulate import Simulation, draft_of, simulate_draft
from p2ptrain.plan.simulation.timeline import TimelineEntry
from p2ptrain.plan.tiling.cost import Costs
from p2ptrain.plan.tiling.maps import tiled_network
from p2ptrain.plan.tiling.pipelined import Pipelined, best_pipelined
from p2ptrain.plan.tiling.row import Passes, Row, row_engine, stage_seconds, tile_parts
from p2ptrain.plan.tiling.search import Asked, Tiling, best_tiling
from p2ptrain.plan.tiling.setting import Setting
from p2ptrain.plan.tiling.shared_rest import SharedRest
from p2ptrain.plan.tiling.simulate import simulate
from p2ptrain.plan.tiling.timeline import tiled_timeline
from p2ptrain.tiles.grid import TileGrid
from p2ptrain.tiles.interior import SPLITTING
from p2ptrain.tiles.network import MapNetwork
from p2ptrain.tiles.shape import TileShape, owners


class Round(NamedTuple):
    """What a plan's round takes: seconds, by device name peak bytes and computing; its timeline."""

    seconds: float
    peak_bytes: dict[str, int]
    busy_seconds: dict[str, float]
    timeline: tuple[TimelineEntry, ...] = ()


def tiled_plan(
    cost: CostModel, request: PlanRequest, *, below: float = inf, every: bool = True
) -> Plan:
    """The best plan with tiles.

    Args:
        below: seconds of a round; nothing slower is wanted.
        every: all devices have tiles, or stages behind them; else those that gain nothing are
            left out.

    Raises:
        PlanError: nothing can be tiled, nothing fits, or nothing is below those seconds.
    """
    network = _network(cost, request)
    devices = _allowed(cost, request)
    if len(devices) < 2:
        raise PlanError("tiles need two devices")
    best: Plan | None = None
    least, reasons = below, list[str]()
    for split in candidate_splits(cost, request):
        setting = Setting.of(cost, network, split, devices)
        asked = _asked(setting, request, least, every=every)
        try:
            tiling = best_tiling(
                setting.problem, setting.tile_devices(), asked, SharedRest(setting)
            )
        except PlanError as error:
            reasons.append(str(error))
        else:
            if tiling.is_tiled and tiling.seconds < least:
                last = Row((tiling.borders[-1], cost.unit_count), (cost.index(tiling.behind),))
                best, least = _plan(setting, tiling, last, (1, 1)), tiling.seconds
            elif not tiling.is_tiled:
                reasons.append("one device is faster alone than with tiles")
                least = min(least, tiling.seconds)
        pipelined = _pipelined(setting, replace(asked, below=least))
        if pipelined is not None:
            tiling, least = pipelined.tiling, pipelined.tiling.seconds
            best = _plan(setting, tiling, pipelined.row, pipelined.depths)
    if best is None:
        raise PlanError("; ".join(dict.fromkeys(reasons)) or "nothing with tiles is faster")
    return with_prediction(cost, replace(best, planner=request.planner))


def _pipelined(setting: Setting, asked: Asked) -> Pipelined | None:
    """Only where there are several micro-batches do tiles compute while others do."""
    if setting.split.micro_batches < 2:
        return None
    return best_pipelined(setting, asked)


def may_be_tiled(cost: CostModel, request: PlanRequest) -> bool:
    """Whether it is worth asking: some units can be tiled, on several devices, as is allowed."""
    return (
        cost.mode is Mode.SYNC
        and request.groups
        and not request.private
        and len(_allowed(cost, request)) > 1
        and tiled_network(cost.profile) is not None
    )


def round_of(cost: CostModel, plan: Plan, *, timeline: bool = False) -> Round:
    """What a round of a plan with tiles takes.

    Args:
        timeline: with one; else it stays empty.

    Raises:
        PlanError: the profile does not say how its units are cut, the grid does not fit them, or a
            stage behind the tiles has several devices.
    """
    first, *behind = plan.stages
    costs, devices = costs_of(cost, plan)
    assert first.tiling is not None
    borders, split = first.tiling.borders, plan.split
    simulated = simulate(costs, borders, record=timeline)
    filters, pieces = costs.problem.filter_memory_bytes, sum(tile_parts(split))
    peaks, busy = dict[str, int](), dict[str, float]()
    for d, held, seconds in zip(devices, costs.memory(borders), simulated.computing, strict=True):
        deep = min(first.warmup, split.micro_batches)
        peaks[cost.name(d)] = ceil(filters + deep * (held - filters))
        busy[cost.name(d)] = pieces * seconds
    stages = [(cost.index(stage.devices[0].name), *stage.units) for stage in behind]
    for stage, place in zip(behind, stages, strict=True):
        name, samples = cost.name(place[0]), split.in_flight_samples(stage.warmup)
        peaks[name] = peaks.get(name, 0) + cost.peak_bytes(*place[1:], samples)
        busy[name] = busy.get(name, 0.0) + stage_seconds(cost, split, *place)
    row = Row((*(begin for _, begin, _ in stages), cost.unit_count), tuple(d for d, *_ in stages))
    passes, depths = Passes.of(cost, costs, simulated), [stage.warmup for stage in plan.stages]
    engine = row_engine(cost, split, passes, row, depths, record=timeline)
    updates = _updates(cost, plan, engine.run())
    seconds = max(update.end_seconds for update in updates)
    if not timeline:
        return Round(seconds, peaks, busy)
    bars = (*tiled_timeline(cost, plan, engine, passes, simulated), *updates)
    return Round(seconds, peaks, busy, bars)


def _updates(cost: CostModel, plan: Plan, begin: float) -> list[TimelineEntry]:
    """Everybody's when all is done; of a device in two stages one after the other."""
    free, found = dict[str, float](), list[TimelineEntry]()
    for p, stage in enumerate(plan.stages):
        for device in stage.devices:
            start = free.get(device.name, begin)
            free[device.name] = start + cost.update_seconds(cost.index(device.name), *stage.units)
            found.append(TimelineEntry("update", device.name, p, None, start, free[device.name]))
    return found


def costs_of(cost: CostModel, plan: Plan) -> tuple[Costs, tuple[int, ...]]:
    """Of the plan's grid, and the devices with tiles. Raises PlanError, as `round_of`."""
    first, *behind = plan.stages
    if any(len(stage.devices) > 1 for stage in behind):
        raise PlanError("what stages of several devices take behind tiles is not predicted")
    network, shape, end = tiled_network(cost.profile), first.tiling, first.units[1]
    assert shape is not None
    if network is None or end > len(network.units):
        raise PlanError(f"the profile does not say how units 0 to {end - 1} are cut into tiles")
    devices = tuple(cost.index(device.name) for device in first.devices)
    setting = Setting.of(cost, network, plan.split, devices)
    problem = setting.problem.first_units(end)
    grid = TileGrid(problem.network, (shape.rows, shape.columns), aligned=shape.aligned)
    costs = Costs(
        *(problem, setting.tile_devices(), grid),
        owners([device.share for device in first.devices]),
        holder=setting.tile_device(cost.holder),
        behind=setting.tile_device(cost.index(behind[0].devices[0].name)),
        early=shape.early,
        splitting=SPLITTING.at(shape.interiors),
    )
    refusal = costs.refusal(shape.borders)
    if refusal is not None:
        raise refusal
    return costs, devices


def _asked(setting: Setting, request: PlanRequest, below: float, *, every: bool) -> Asked:
    return Asked(
        grid=request.grid,
        borders=request.groups_of_units,
        every=every,
        below=below,
        pieces=sum(tile_parts(setting.split)),
        holder=setting.tile_device(setting.cost.holder),
    )


def _plan(setting: Setting, tiling: Tiling, row: Row, depths: Sequence[int]) -> Plan:
    """Without its prediction."""
    cost, split = setting.cost, setting.split
    lines = tiling.rows, tiling.columns, tiling.borders
    shape = TileShape(*lines, tiling.aligned, tiling.early, tiling.interiors)
    devices = tuple(map(DeviceShare, tiling.devices, tiling.shares))
    stages = [PlannedStage((0, shape.units), devices, depths[0], Allocation.TILES, tiling=shape)]
    for depth, (device, begin, end) in zip(depths[1:], row.stages, strict=True):
        alone = (DeviceShare(cost.name(device), split.micro_batch),)
        stages.append(PlannedStage((begin, end), alone, depth))
    used = {share.name for stage in stages for share in stage.devices}
    rows, columns = tiling.grid
    reason = f"no tile for it: {rows}x{columns} tiles on {len(devices)} devices"
    return Plan(
        planner="tiles",
        split=split,
        stages=tuple(stages),
        predicted=Predicted(0.0, 0.0, {}),
        left_out=tuple(LeftOut(d.name, reason) for d in cost.devices if d.name not in used),
    )


def with_prediction(cost: CostModel, plan: Plan) -> Plan:
    """`plan` with what its round takes."""
    taken = round_of(cost, plan)
    rate = plan.split.batch_size / taken.seconds if taken.seconds > 0 else 0.0
    return replace(plan, predicted=Predicted(taken.seconds, rate, taken.peak_bytes))


def _network(cost: CostModel, request: PlanRequest) -> MapNetwork:
    if request.private:
        raise PlanError("with --private images stay on one device: their tiles are not sent")
    if cost.mode is not Mode.SYNC:
        raise PlanError("stages are tiled in mode sync only")
    if not request.groups:
        raise PlanError("tiles are several devices for one stage, which the request does not allow")
    network = tiled_network(cost.profile)
    if network is None:
        raise PlanError(
            "no unit of this profile can be cut into tiles: none says its windows and maps"
        )
    count = min(len(network.units), cost.unit_count - 1)  # somebody computes the loss
    if count < 1:
        raise PlanError("a model of one unit cannot be tiled: something must follow the tiles")
    if count < network.least:
        raise PlanError(
            "the last unit reads the model's input, and something must follow the tiles"
        )
    wanted = request.groups_of_units
    if wanted and wanted[-1] > count:
        raise PlanError(
            f"--groups: units 0 to {count - 1} can be cut into tiles, not unit {wanted[-1] - 1}"
        )
    if wanted and wanted[-1] < network.least:
        raise PlanError(
            f"--groups: tiles cannot end behind unit {wanted[-1] - 1}, as unit {network.least - 1} "
            "reads the model's input too"
        )
    return network.first_units(count)


def _allowed(cost: CostModel, request: PlanRequest) -> tuple[int, ...]:
    return tuple(
        index
        for index, device in enumerate(cost.devices)
        if request.only is None or device.name in request.only
    )


def round_seconds(cost: CostModel, plan: Plan) -> float:
    """Of a round of any plan, with tiles or without. Raises PlanError, as `round_of`."""
    if plan.stages[0].tiling is not None:
        return round_of(cost, plan).seconds
    return simulate_draft(cost, draft_of(plan, cost)).round_seconds


def simulate_tiled(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    timeline: bool = False,
    overlap: bool = False,
) -> Simulation:
    """One round of a plan with tiles, as `simulation.simulate` of others.

    Raises:
        OptionError: the plan does not belong to this profile and cluster.
        PlanError: the profile does not say how its units are cut, or the grid does not fit them.
    """
    check_plan(plan, profile, cluster)
    cost = CostModel(profile, cluster, overlap=overlap)
    taken = round_of(cost, plan, timeline=timeline)
    rate = plan.split.batch_size / taken.seconds if taken.seconds > 0 else 0.0
    return Simulation(taken.seconds, rate, taken.busy_seconds, taken.peak_bytes, taken.timeline)
