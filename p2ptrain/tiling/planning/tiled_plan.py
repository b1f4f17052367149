"""Plans whose first stage is tiled.

Either one of the tiles' devices has the rest of the model: then a round is one micro-batch after
another, forward through the tiles and what follows, and back; and last the all-reduce of the
filters' gradients and the update, so that no device waits longer for the one with both. Or devices
without tiles have the rest and work on one micro-batch while the tiles are at the next
(`pipelined_tiling.py`): a pipeline of them, or one stage that they share. `tiled_pipeline.py` times
both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf
from typing import NamedTuple

from p2ptrain.errors import OptionError, PlanError
from p2ptrain.plan.cost.check_plan import check_plan
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import place_seconds
from p2ptrain.plan.problem.candidates import candidate_splits
from p2ptrain.plan.simulation.simulate import (
    Simulation,
    draft_of,
    group_of,
    simulate,
    simulate_draft,
)
from p2ptrain.plan.types.allocation import MAX_TILES, Allocation, BatchSplit, TileShape, owners
from p2ptrain.plan.types.cluster import PROCESSOR, Cluster
from p2ptrain.plan.types.feature_maps import MapNetwork
from p2ptrain.plan.types.plan import DeviceShare, LeftOut, Plan, PlannedStage, Predicted
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest, Schedule
from p2ptrain.plan.types.timeline import TimelineEntry
from p2ptrain.tiling.grid import TileGrid
from p2ptrain.tiling.planning.pipelined_tiling import best_pipelined
from p2ptrain.tiling.planning.profile_maps import tiled_network
from p2ptrain.tiling.planning.tiled_pipeline import (
    Passes,
    TrailingPipeline,
    pipeline_engine,
    tile_parts,
)
from p2ptrain.tiling.planning.tiling_cost import Costs
from p2ptrain.tiling.planning.tiling_problem import NothingFits, Taker, describe_refusals
from p2ptrain.tiling.planning.tiling_search import best_tiling
from p2ptrain.tiling.planning.tiling_setting import SharedRest, Tiling, TilingRequest, TilingSetting
from p2ptrain.tiling.planning.tiling_simulation import simulate_tiles
from p2ptrain.tiling.planning.tiling_timeline import tiled_timeline

_ONE_TILE = (
    "--grid 1x1 is one tile, so the whole model would be on one device: give more tiles, or use "
    "--planner single"
)


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
    if request.grid is not None:
        _check_grid(network, *request.grid)
    devices = _allowed(cost, request, every=every)
    if len(devices) < 2:
        raise PlanError("tiles need two devices")
    best: Plan | None = None
    least, reasons = below, list[PlanError]()
    for split in candidate_splits(cost, request):
        setting = TilingSetting.of(cost, network, split, devices)
        asked = _asked(setting, request, least, every=every)
        try:
            if request.grid == (1, 1):  # only in front of other devices
                raise NothingFits([PlanError(_ONE_TILE)])
            tiling = best_tiling(
                *(setting.problem, setting.tile_devices(), asked, SharedRest(setting)),
                setting.tile_device(cost.holder),
            )
        except NothingFits as error:
            reasons.extend(error.reasons)
        else:
            best, least = _plan(setting, tiling), tiling.seconds
        pipelined = best_pipelined(setting, replace(asked, below=least))
        if pipelined is not None:
            best, least = _plan(setting, pipelined), pipelined.seconds
    if best is None:
        raise PlanError(describe_refusals(reasons) or "no plan with tiles is faster")
    return with_prediction(cost, replace(best, planner=request.planner))


def may_be_tiled(cost: CostModel, request: PlanRequest) -> bool:
    """Whether it is worth asking: some units can be tiled, on several devices, as is allowed."""
    return (
        cost.mode is PlanMode.SYNC
        and request.groups
        and not request.private
        and len(_allowed(cost, request)) > 1
        and tiled_network(cost.profile) is not None
    )


def round_of(cost: CostModel, plan: Plan, *, timeline: bool = False) -> Simulation:
    """What a round of a plan with tiles takes.

    Args:
        timeline: with one; else it stays empty.

    Raises:
        PlanError: the profile does not say how its units are cut, or the grid does not fit them.
    """
    tiled, row, split = costs_of(cost, plan), row_of(cost, plan), plan.split
    simulated = simulate_tiles(tiled.costs, tiled.borders, record=timeline)
    passes = Passes.of(cost, tiled.costs, simulated, tiled.takers)
    depths = [stage.warmup for stage in plan.stages]
    engine = pipeline_engine(cost, split, passes, row, depths, record=timeline)
    updates = _updates(cost, plan, engine.run())
    seconds = max(update.end_seconds for update in updates)
    bars = tiled_timeline(cost, plan, engine, passes, simulated) if timeline else ()
    return Simulation(
        round_seconds=seconds,
        samples_per_s=split.batch_size / seconds if seconds > 0 else 0.0,
        busy_seconds=_busy(cost, tiled, row, split, simulated.computing),
        peak_bytes=_peaks(cost, tiled, row, split, depths),
        timeline=(*bars, *updates) if timeline else (),
    )


def _peaks(
    cost: CostModel, tiled: Tiled, row: TrailingPipeline, split: BatchSplit, depths: Sequence[int]
) -> dict[str, int]:
    """Bytes by device; of one in two stages both together."""
    filters, peaks = tiled.costs.problem.filters.trained, dict[str, int]()
    deep = min(depths[0], split.micro_batches)
    for d, held in zip(tiled.devices, tiled.costs.memory(tiled.borders), strict=True):
        peaks[cost.name(d)] = ceil(filters + deep * (held - filters))
    for (group, units), depth in zip(row.stages, depths[1:], strict=True):
        for place, d in enumerate(group.devices):
            samples = group.in_flight_samples(split, place, depth)
            peak = cost.peak_bytes(*units, samples)
            peaks[cost.name(d)] = peaks.get(cost.name(d), 0) + peak
    return peaks


def _busy(
    cost: CostModel,
    tiled: Tiled,
    row: TrailingPipeline,
    split: BatchSplit,
    computing: Sequence[float],
) -> dict[str, float]:
    """Seconds by device.

    Args:
        computing: of a full micro-batch in tiles, by device with tiles.
    """
    pieces, busy = sum(tile_parts(split)), dict[str, float]()
    for d, seconds in zip(tiled.devices, computing, strict=True):
        busy[cost.name(d)] = pieces * seconds
    for group, units in row.stages:
        for place, d in enumerate(group.devices):
            seconds = place_seconds(cost, split, group, place, units)
            busy[cost.name(d)] = busy.get(cost.name(d), 0.0) + seconds
    return busy


def _updates(cost: CostModel, plan: Plan, begin: float) -> list[TimelineEntry]:
    """All devices' when all is done; of a device in two stages one after the other."""
    free, found = dict[str, float](), list[TimelineEntry]()
    for p, stage in enumerate(plan.stages):
        for device in stage.devices:
            start = free.get(device.name, begin)
            free[device.name] = start + cost.update_seconds(cost.index(device.name), *stage.units)
            found.append(TimelineEntry("update", device.name, p, None, start, free[device.name]))
    return found


class Tiled(NamedTuple):
    """What a plan's tiles cost.

    Attributes:
        devices: those with tiles.
        takers: the devices of the first stage behind them.
        borders: of the groups of tiled units.
    """

    costs: Costs
    devices: tuple[int, ...]
    takers: Sequence[Taker]
    borders: tuple[int, ...]


def costs_of(cost: CostModel, plan: Plan) -> Tiled:
    """Of the plan's grid. Raises PlanError, as `round_of`."""
    first, *_ = plan.stages
    network, shape, end = tiled_network(cost.profile), first.tiling, first.units[1]
    assert shape is not None
    if network is None or end > len(network.units):
        raise PlanError(
            f"this profile has no convolution sizes (spatial) of layers 0 to {end - 1}: make it "
            "again with p2ptrain profile"
        )
    devices = tuple(cost.index(device.name) for device in first.devices)
    setting = TilingSetting.of(cost, network, plan.split, devices)
    problem = setting.problem.first_units(end)
    grid = TileGrid(problem.network, (shape.rows, shape.columns), aligned=shape.aligned)
    takers = setting.takers(row_of(cost, plan).groups[0])
    costs = Costs(
        *(problem, setting.tile_devices(), grid),
        owners([device.share for device in first.devices]),
        holder=setting.tile_device(cost.holder),
        behind=takers[0].device,
        early=shape.early,
    )
    refusal = costs.refusal(shape.borders)
    if refusal is not None:
        raise refusal
    return Tiled(costs, devices, takers, shape.borders)


def row_of(cost: CostModel, plan: Plan) -> TrailingPipeline:
    """What follows a plan's tiles."""
    _, *behind = plan.stages
    borders = (*(stage.units[0] for stage in behind), cost.unit_count)
    return TrailingPipeline(borders, tuple(group_of(cost, stage) for stage in behind))


def _asked(
    setting: TilingSetting, request: PlanRequest, below: float, *, every: bool
) -> TilingRequest:
    return TilingRequest(
        grid=request.grid,
        borders=request.groups_of_units,
        every=every,
        below=below,
        pieces=sum(tile_parts(setting.split)),
        allocations=request.allocations,
    )


def _plan(setting: TilingSetting, tiling: Tiling) -> Plan:
    """Without its prediction."""
    cost, split, (_, row, depths) = setting.cost, setting.split, tiling.rest
    lines = tiling.rows, tiling.columns, tiling.borders
    shape = TileShape(*lines, tiling.aligned, tiling.early)
    devices = tuple(map(DeviceShare, tiling.devices, tiling.shares))
    stages = [
        PlannedStage(
            *((0, shape.units), devices, depths[0], Allocation.TILES),
            tiling=shape,
            bucket_bytes=_bucket_bytes(cost, [cost.index(name) for name in tiling.devices]),
        )
    ]
    for depth, (group, units) in zip(depths[1:], row.stages, strict=True):
        shares = zip(group.devices, group.shares, strict=True)
        named = tuple(DeviceShare(cost.name(device), share) for device, share in shares)
        size = _bucket_bytes(cost, group.devices)
        stages.append(PlannedStage(units, named, depth, group.allocation, bucket_bytes=size))
    used = {share.name for stage in stages for share in stage.devices}
    rows, columns = tiling.grid
    grid = f"no tile for it: {rows}x{columns} tiles on {len(devices)} devices"
    reasons = {
        device.name: grid if _has_tiles(cost, d) else f"tiles are faster than {device.compute}"
        for d, device in enumerate(cost.devices)
    }
    return Plan(
        planner="tiles",
        split=split,
        stages=tuple(stages),
        predicted=Predicted(0.0, 0.0, {}),
        left_out=tuple(LeftOut(n, reason) for n, reason in reasons.items() if n not in used),
    )


def _bucket_bytes(cost: CostModel, devices: Sequence[int]) -> int:
    return cost.bucket_sizes(devices).least_bytes


def with_prediction(cost: CostModel, plan: Plan) -> Plan:
    """`plan` with what its round takes."""
    found = round_of(cost, plan)
    return replace(
        plan, predicted=Predicted(found.round_seconds, found.samples_per_s, found.peak_bytes)
    )


def _network(cost: CostModel, request: PlanRequest) -> MapNetwork:
    if request.private:
        raise PlanError(
            "--private keeps images on one device, and tiles send them to others: leave out one"
        )
    if cost.mode is not PlanMode.SYNC:
        raise PlanError("stages are tiled in mode sync only")
    if not request.groups:
        raise PlanError("tiles need several devices for the same layers, which is not allowed here")
    network = tiled_network(cost.profile)
    if network is None:
        raise PlanError(
            "this profile has no convolution sizes (spatial): the model has no convolutions that "
            "tiles can divide, or the profile is to be made again with p2ptrain profile"
        )
    count = min(len(network.units), cost.unit_count - 1)  # a device behind them computes the loss
    if count < 1:
        raise PlanError("a model of one layer cannot be computed in tiles: another must follow")
    if count < network.least:
        raise PlanError("the last layer reads the images, so no layer can follow the tiles")
    wanted = request.groups_of_units
    if wanted and wanted[-1] > count:
        raise PlanError(
            f"--groups: layers 0 to {count - 1} can be computed in tiles, not layer "
            f"{wanted[-1] - 1}"
        )
    if wanted and wanted[-1] < network.least:
        raise PlanError(
            f"--groups: tiles cannot end after layer {wanted[-1] - 1}, because layer "
            f"{network.least - 1} reads the images too"
        )
    return network.first_units(count)


def _check_grid(network: MapNetwork, rows: int, columns: int) -> None:
    """Before lines are drawn, which takes long for many. Raises PlanError, OptionError."""
    if rows * columns > MAX_TILES:
        raise OptionError(f"--grid: at most {MAX_TILES} tiles, found {rows * columns}")
    first = network.first_units(max(network.least, 1))
    TileGrid(first, ([1.0] * rows, [1.0] * columns))


def _allowed(cost: CostModel, request: PlanRequest, *, every: bool = False) -> tuple[int, ...]:
    """Devices that tiles may use: processors. Raises PlanError: `every` one is to be used."""
    found = [
        index
        for index, device in enumerate(cost.devices)
        if request.only is None or device.name in request.only
    ]
    others = [cost.devices[index] for index in found if not _has_tiles(cost, index)]
    if others and every:
        raise PlanError(
            f"planner tiles divides feature maps between processors, and {others[0].name} computes "
            f"with {others[0].compute}: use --planner auto, or --device cpu there"
        )
    return tuple(index for index in found if _has_tiles(cost, index))


def _has_tiles(cost: CostModel, device: int) -> bool:
    return cost.devices[device].compute == PROCESSOR


def round_seconds(cost: CostModel, plan: Plan) -> float:
    """Of a round of any plan, with tiles or without. Raises PlanError, as `round_of`."""
    if plan.stages[0].tiling is not None:
        return round_of(cost, plan).round_seconds
    return simulate_draft(cost, draft_of(plan, cost)).round_seconds


def simulate_plan(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    timeline: bool = False,
    overlap: bool = False,
    updates_ahead: bool = True,
    schedule: Schedule | None = None,
) -> Simulation:
    """As `simulation.simulate`, of any plan, with tiles or without.

    Raises:
        OptionError: the plan does not belong to this profile and cluster.
        PlanError: the profile does not say how its units are cut, or the grid does not fit them.
    """
    if plan.stages[0].tiling is None:
        return simulate(
            *(plan, profile, cluster),
            timeline=timeline,
            overlap=overlap,
            updates_ahead=updates_ahead,
            schedule=schedule,
        )
    check_plan(plan, profile, cluster)
    return round_of(CostModel(profile, cluster, overlap=overlap), plan, timeline=timeline)
