"""Plans whose first stage is tiled, the rest behind it on the fastest of its devices.

A round is one micro-batch after the other: forward through the tiles and what follows, and back;
then the sum of the filters' gradients and the update. So a device with tiles may have the rest
without anybody waiting longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from statistics import median_high, median_low
from typing import NamedTuple

from p2ptrain.errors import PlanError
from p2ptrain.plan.allocation import Allocation
from p2ptrain.plan.check import check_plan
from p2ptrain.plan.cluster import Cluster, Link
from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.overheads import REFERENCE, Overheads
from p2ptrain.plan.plan import DeviceShare, LeftOut, Plan, PlannedStage, Predicted
from p2ptrain.plan.profile import Profile
from p2ptrain.plan.request import Mode, PlanRequest
from p2ptrain.plan.shared.micro_batches import candidate_splits
from p2ptrain.plan.simulation.simulate import Simulation, draft_of, simulate_draft
from p2ptrain.plan.split import BatchSplit
from p2ptrain.plan.tiling.cost import Costs
from p2ptrain.plan.tiling.maps import tiled_network
from p2ptrain.plan.tiling.problem import TileDevice, TilingProblem
from p2ptrain.plan.tiling.search import Asked, Tiling, best_tiling
from p2ptrain.plan.tiling.simulate import simulate
from p2ptrain.tiles.grid import TileGrid
from p2ptrain.tiles.network import MapNetwork
from p2ptrain.tiles.shape import TileShape, owners

MESSAGE_OF_MEASURED = 0.35
"""A message between tiles costs so much of what a device's yardsticks say: those to and from
several devices are made, sent and read in the same turns of the event loop. 0.25 ms of a core for
0.75 with six devices (`tools/tile_speed`, processor time of the loop's thread)."""
BYTE_OF_MEASURED = 0.7
"""The same of a byte: 4 ns for 5.8, as large messages leave the caches alone."""


class Round(NamedTuple):
    """What a plan's round takes: seconds, and by device name peak bytes and computing."""

    seconds: float
    peak_bytes: dict[str, int]
    busy_seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Setting:
    """One micro-batch size on some devices.

    Attributes:
        reference: the device that the question's times are of, the fastest.
    """

    cost: CostModel
    network: MapNetwork
    split: BatchSplit
    devices: tuple[int, ...]
    reference: int

    @property
    def problem(self) -> TilingProblem:
        """About one full micro-batch."""
        cost, network = self.cost, self.network
        count, samples = len(network.units), self.split.first_samples
        times = cost.unit_times(self.reference, samples)
        return TilingProblem(
            network=network,
            forward=tuple(times.forward[:count]),
            backward=tuple(times.backward[:count]),
            kept_bytes=tuple(float(unit.activation_bytes) for unit in cost.profile.units[:count]),
            samples=samples,
            link=_slowest(cost, self.devices),
            optimizer_state_ratio=cost.profile.optimizer_state_ratio,
            overheads=_overheads(cost, self.reference),
        )

    def tile_devices(self) -> list[TileDevice]:
        """As the question sees them."""
        devices = self.cost.devices
        return [
            TileDevice(devices[d].name, self.slowdown(d), devices[d].memory_bytes)
            for d in self.devices
        ]

    def slowdown(self, device: int) -> float:
        """By what the tiled units take."""
        return max(self._whole(device) / max(self._whole(self.reference), 1e-12), 1e-9)

    def _whole(self, device: int) -> float:
        return _map_seconds(self.cost, self.network, device, self.split.first_samples)


def tiled_plan(
    cost: CostModel, request: PlanRequest, *, below: float = inf, every: bool = True
) -> Plan:
    """The best plan with tiles.

    Args:
        below: seconds of a round; nothing slower is wanted.
        every: all devices have tiles; else those that gain nothing are left out.

    Raises:
        PlanError: nothing can be tiled, nothing fits, or nothing is below those seconds.
    """
    network = _network(cost, request)
    devices = _allowed(cost, request)
    if len(devices) < 2:
        raise PlanError("tiles need two devices")
    found: list[tuple[Tiling, _Setting]] = []
    reasons: list[str] = []
    for split in candidate_splits(cost, request):
        fastest = min(
            devices, key=lambda d: (_map_seconds(cost, network, d, split.first_samples), d)
        )
        setting = _Setting(cost, network, split, devices, fastest)
        try:
            found.append((_searched(setting, request, below, every=every), setting))
        except PlanError as error:
            reasons.append(str(error))
    if not found:
        raise PlanError("; ".join(dict.fromkeys(reasons)))
    tiling, setting = min(found, key=lambda pair: pair[0].seconds)
    return _plan(tiling, setting, request.planner)


def may_be_tiled(cost: CostModel, request: PlanRequest) -> bool:
    """Whether it is worth asking: some units can be tiled, on several devices, as is allowed."""
    return (
        cost.mode is Mode.SYNC
        and request.groups
        and not request.private
        and len(_allowed(cost, request)) > 1
        and tiled_network(cost.profile) is not None
    )


def round_of(cost: CostModel, plan: Plan) -> Round:
    """What a round of a plan with tiles takes.

    Raises:
        PlanError: the profile does not say how its units are cut, or the grid does not fit them.
    """
    first, *behind = plan.stages
    network = tiled_network(cost.profile)
    assert first.tiling is not None
    shape, end = first.tiling, first.units[1]
    if network is None or end > len(network.units):
        raise PlanError(f"the profile does not say how units 0 to {end - 1} are cut into tiles")
    devices = tuple(cost.index(device.name) for device in first.devices)
    split = plan.split
    fastest = min(devices, key=lambda d: (_map_seconds(cost, network, d, split.first_samples), d))
    setting = _Setting(cost, network, split, devices, fastest)
    problem = setting.problem.first_units(end)
    grid = TileGrid(problem.network, (shape.rows, shape.columns), aligned=shape.aligned)
    shares = [device.share for device in first.devices]
    holder = devices.index(cost.holder) if cost.holder in devices else -1
    after = cost.index(behind[0].devices[0].name)
    costs = Costs(
        *(problem, setting.tile_devices(), grid, owners(shares)),
        holder=holder,
        behind=devices.index(after) if after in devices else -1,
        early=shape.early,
    )
    if any(costs.group(*group) is None for group in _groups(shape)):
        raise PlanError("the grid's tiles are narrower than a group's halo")
    simulated = simulate(costs, shape.borders)
    held = costs.memory(shape.borders)
    peaks = {cost.name(d): ceil(size) for d, size in zip(devices, held, strict=True)}
    busy = {
        cost.name(d): split.micro_batches * seconds
        for d, seconds in zip(devices, simulated.computing, strict=True)
    }
    piece = simulated.seconds - simulated.filters
    update = max(cost.update_seconds(d, 0, end) for d in devices)
    for stage in behind:
        device = cost.index(stage.devices[0].name)
        seconds = sum(cost.stage_seconds(device, *stage.units, split.first_samples))
        piece += seconds
        update = max(update, cost.update_seconds(device, *stage.units))
        name = cost.name(device)
        peaks[name] = peaks.get(name, 0) + cost.peak_bytes(*stage.units, split.first_samples)
        busy[name] = busy.get(name, 0.0) + split.micro_batches * seconds
    return Round(split.micro_batches * piece + simulated.filters + update, peaks, busy)


def _searched(setting: _Setting, request: PlanRequest, below: float, *, every: bool) -> Tiling:
    cost, split = setting.cost, setting.split
    count, units, samples = len(setting.network.units), cost.unit_count, split.first_samples
    fastest = setting.reference
    asked = Asked(
        grid=request.grid,
        borders=request.groups_of_units,
        every=every,
        below=below,
        pieces=split.micro_batches,
        holder=cost.name(cost.holder),
        tail_seconds=sum(cost.stage_seconds(fastest, count, units, samples)),
        tail_bytes=cost.peak_bytes(count, units, samples),
    )
    tiling = best_tiling(setting.problem, setting.tile_devices(), asked)
    if not tiling.is_tiled:
        raise PlanError("one device is faster alone than with tiles")
    return tiling


def _plan(tiling: Tiling, setting: _Setting, planner: str) -> Plan:
    cost, split = setting.cost, setting.split
    shape = TileShape(tiling.rows, tiling.columns, tiling.borders, tiling.aligned, tiling.early)
    devices = tuple(map(DeviceShare, tiling.devices, tiling.shares))
    behind = DeviceShare(cost.name(setting.reference), split.micro_batch)
    stages = (
        PlannedStage((0, shape.units), devices, 1, Allocation.TILES, tiling=shape),
        PlannedStage((shape.units, cost.unit_count), (behind,), 1),
    )
    unused = [device.name for device in cost.devices if device.name not in tiling.devices]
    rows, columns = tiling.grid
    reason = f"no tile for it: {rows}x{columns} tiles on {len(devices)} devices"
    plan = Plan(
        planner=planner,
        split=split,
        stages=stages,
        predicted=Predicted(0.0, 0.0, {}),
        left_out=tuple(LeftOut(name, reason) for name in unused),
    )
    return with_prediction(cost, plan)


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
    wanted = request.groups_of_units
    if wanted and wanted[-1] > count:
        raise PlanError(
            f"--groups: units 0 to {count - 1} can be cut into tiles, not unit {wanted[-1] - 1}"
        )
    return network.first_units(count)


def _allowed(cost: CostModel, request: PlanRequest) -> tuple[int, ...]:
    return tuple(
        index
        for index, device in enumerate(cost.devices)
        if request.only is None or device.name in request.only
    )


def _map_seconds(cost: CostModel, network: MapNetwork, device: int, samples: int) -> float:
    times, count = cost.unit_times(device, samples), len(network.units)
    return sum(times.forward[:count]) + sum(times.backward[:count])


def _slowest(cost: CostModel, devices: Sequence[int]) -> Link:
    """The slowest device's, whose own is the median of those to the others.

    A slow device has slow links to all; one slow pair among many is a measurement that something
    came between.
    """
    if len(devices) < 2:
        return Link(inf, 0.0)
    rates, latencies = [], []
    for device in devices:
        pairs = [(a, b) for other in devices for a, b in ((device, other), (other, device))]
        links = [cost.links.link(a, b) for a, b in pairs if a != b]
        rates.append(median_low(link.bytes_per_s for link in links))
        latencies.append(median_high(link.latency_s for link in links))
    return Link(min(rates), max(latencies))


def _overheads(cost: CostModel, device: int) -> Overheads:
    """Messages are most of what tiles cost, so the plain model counts them too."""
    found = cost.devices[device]
    measured = found.overheads
    if measured is None:
        return REFERENCE.times_slowdown(found.slowdown)
    return replace(
        measured,
        message_seconds=MESSAGE_OF_MEASURED * measured.message_seconds,
        byte_seconds=BYTE_OF_MEASURED * measured.byte_seconds,
    )


def _groups(shape: TileShape) -> list[tuple[int, int]]:
    return list(zip(shape.borders, shape.borders[1:], strict=False))


def round_seconds(cost: CostModel, plan: Plan) -> float:
    """Of a round of any plan, with tiles or without. Raises PlanError, as `round_of`."""
    if plan.stages[0].tiling is not None:
        return round_of(cost, plan).seconds
    return simulate_draft(cost, draft_of(plan, cost)).round_seconds


def simulate_tiled(
    plan: Plan, profile: Profile, cluster: Cluster, *, overlap: bool = False
) -> Simulation:
    """One round of a plan with tiles, as `simulation.simulate` of others; without a timeline.

    Raises:
        OptionError: the plan does not belong to this profile and cluster.
        PlanError: the profile does not say how its units are cut, or the grid does not fit them.
    """
    check_plan(plan, profile, cluster)
    cost = CostModel(profile, cluster, overlap=overlap)
    taken = round_of(cost, plan)
    rate = plan.split.batch_size / taken.seconds if taken.seconds > 0 else 0.0
    return Simulation(taken.seconds, rate, taken.busy_seconds, taken.peak_bytes, ())
