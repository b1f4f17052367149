"""A question about tiles, from profiles and links: one micro-batch size on some devices.

`TilingRequest` is what was asked for, `Tiling` an answer, `TilingCandidate` one being tried.
`SharedRest` is the rest of the model on a device with tiles: each micro-batch passes the tiles,
then the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import StageGroup, alone, place_seconds
from p2ptrain.plan.types.allocation import EVERY_ALLOCATION, Allocation, BatchSplit
from p2ptrain.plan.types.cluster import REFERENCE, Overheads
from p2ptrain.plan.types.feature_maps import MapNetwork
from p2ptrain.tiling.planning.tiled_pipeline import (
    Passes,
    TrailingChoice,
    TrailingPipeline,
    pipeline_seconds,
)
from p2ptrain.tiling.planning.tiling_cost import Costs
from p2ptrain.tiling.planning.tiling_problem import (
    OF_TILES,
    Taker,
    TileDevice,
    TileLinks,
    TilingProblem,
)
from p2ptrain.tiling.planning.tiling_simulation import simulate_tiles

MESSAGE_OF_MEASURED = 0.26
"""A message between tiles costs so much of what a device's yardsticks say: those to and from
several devices are made, sent and read in the same turns of the event loop. 0.25 ms of a core for
1.0 with six devices (processor time of the loop's thread)."""

BYTE_OF_MEASURED = 1.7
"""The same of a byte: 4 ns for 2.3, as tiles' edges are copied out of maps and into them."""


@dataclass(frozen=True, slots=True)
class TilingSetting:
    """See the module.

    Attributes:
        reference: the device that the question's times are of, the fastest.
    """

    cost: CostModel
    network: MapNetwork
    split: BatchSplit
    devices: tuple[int, ...]
    reference: int

    @staticmethod
    def of(
        cost: CostModel, network: MapNetwork, split: BatchSplit, devices: Iterable[int]
    ) -> TilingSetting:
        """With the fastest of `devices` as the reference."""
        used, samples = tuple(devices), split.first_samples
        fastest = min(used, key=lambda d: (map_seconds(cost, network, d, samples), d))
        return TilingSetting(cost, network, split, used, fastest)

    @property
    def problem(self) -> TilingProblem:
        """About one full micro-batch."""
        cost, network = self.cost, self.network
        count, samples = len(network.units), self.split.first_samples
        times, links = cost.unit_times(self.reference, samples), TileLinks.of(cost)
        return TilingProblem(
            network=network,
            forward=tuple(times.forward[:count]),
            backward=tuple(times.backward[:count]),
            kept_bytes=tuple(float(unit.activation_bytes) for unit in cost.profile.units[:count]),
            samples=samples,
            link=links.among([cost.name(device) for device in self.devices]),
            optimizer_state_ratio=cost.profile.optimizer_state_ratio,
            overheads=_overheads(cost, self.reference),
            sums=_sums(cost, self.reference),
            links=links,
        )

    def tile_devices(self) -> list[TileDevice]:
        """As the question sees them."""
        return [self.tile_device(device) for device in self.devices]

    def tile_device(self, device: int) -> TileDevice:
        """One of them, or another."""
        found = self.cost.devices[device]
        return TileDevice(found.name, self.slowdown(device), found.memory_bytes)

    def takers(self, group: StageGroup) -> list[Taker]:
        """The devices of the first stage behind the tiles, with what they have of a micro-batch."""
        samples = self.split.first_samples
        return [
            Taker(self.tile_device(device), (end - first) / samples)
            for device, (first, end) in zip(group.devices, group.ranges(samples), strict=True)
        ]

    def slowdown(self, device: int) -> float:
        """By what the tiled units take."""
        return max(self._whole(device) / max(self._whole(self.reference), 1e-12), 1e-9)

    def _whole(self, device: int) -> float:
        return map_seconds(self.cost, self.network, device, self.split.first_samples)


def map_seconds(cost: CostModel, network: MapNetwork, device: int, samples: int) -> float:
    """Forward and backward of all the units that may be tiled, on that device."""
    times, count = cost.unit_times(device, samples), len(network.units)
    return sum(times.forward[:count]) + sum(times.backward[:count])


def _sums(cost: CostModel, device: int) -> Overheads:
    found = cost.devices[device]
    return found.overheads or REFERENCE.times_slowdown(found.slowdown)


def _overheads(cost: CostModel, device: int) -> Overheads:
    """Messages are most of what tiles cost, so the plain model counts them too."""
    found = cost.devices[device]
    measured = found.overheads
    if measured is None:
        return OF_TILES.times_slowdown(found.slowdown)
    return replace(
        measured,
        message_seconds=MESSAGE_OF_MEASURED * measured.message_seconds,
        byte_seconds=BYTE_OF_MEASURED * measured.byte_seconds,
    )


@dataclass(frozen=True, slots=True)
class SharedRest:
    """All units behind the tiles (`search.Rest`)."""

    setting: TilingSetting

    def alone(self, device: TileDevice, units: int) -> float:
        """Seconds of a mini-batch, of all behind the first `units`."""
        cost, split = self.setting.cost, self.setting.split
        group = alone(split, cost.index(device.name))
        return place_seconds(cost, split, group, 0, (units, cost.unit_count))

    def held_bytes(self, units: int) -> float:
        """With one micro-batch in flight."""
        cost, samples = self.setting.cost, self.setting.split.first_samples
        return cost.peak_bytes(units, cost.unit_count, samples)

    def whole(self, device: TileDevice, costs: Costs, borders: tuple[int, ...]) -> TrailingChoice:
        """With tiles in these groups."""
        cost, split = self.setting.cost, self.setting.split
        row = TrailingPipeline.straight(
            split, (borders[-1], cost.unit_count), (cost.index(device.name),)
        )
        passes = Passes.of(cost, costs, simulate_tiles(costs, borders), [Taker(device)])
        return TrailingChoice(pipeline_seconds(cost, split, passes, row, (1, 1)), row, (1, 1))


@dataclass(frozen=True, slots=True)
class TilingRequest:
    """What stands around the tiles, and what was asked for.

    Attributes:
        grid: (rows, columns); None = what is best.
        borders: of the groups; () = what is best.
        every: all devices have tiles.
        below: seconds; nothing slower is wanted.
        pieces: micro-batches of a mini-batch, a smaller last one as the part that it is; the
            question is about one of them.
        allocations: how devices behind the tiles may share a stage.
    """

    grid: tuple[int, int] | None = None
    borders: tuple[int, ...] = ()
    every: bool = False
    below: float = inf
    pieces: float = 1.0
    allocations: frozenset[Allocation] = EVERY_ALLOCATION


@dataclass(frozen=True, slots=True)
class Tiling:
    """A way to run the first units.

    Attributes:
        devices: names, in the order of their tiles.
        shares: tiles of each, in row order.
        grid: (rows, columns).
        rows, columns: parts of the maps' height and width.
        aligned: how lines are carried from map to map.
        borders: of the groups, in units.
        early: those of them where halos travel with statistics, ascending.
        rest: what is behind the tiles, and how long all takes.
        bound: what no tiling of the tiled units undercuts, the rest included.
        memory_bytes: by device, of the tiled units alone.
    """

    devices: tuple[str, ...]
    shares: tuple[int, ...]
    grid: tuple[int, int]
    rows: tuple[float, ...]
    columns: tuple[float, ...]
    aligned: bool
    borders: tuple[int, ...]
    rest: TrailingChoice
    bound: float
    memory_bytes: tuple[float, ...]
    early: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """Simulated, of a mini-batch, what is behind the tiles included."""
        return self.rest.seconds


@dataclass(frozen=True, slots=True)
class TilingCandidate:
    """What may be tried: so many units on some devices.

    Attributes:
        devices: in the order of their tiles.
        whole: what follows tiles in these groups, and how long all takes.
        bound: what none of its grids undercuts, the same.
        behind: the device with what follows first, which may have tiles.
        holder: the device that has the images; None = the fastest.
    """

    problem: TilingProblem
    devices: tuple[TileDevice, ...]
    whole: Callable[[Costs, tuple[int, ...]], TrailingChoice]
    bound: float
    behind: TileDevice
    holder: TileDevice | None = None


class Rest(Protocol):
    """What is not tiled, on one device that may have tiles too."""

    def alone(self, device: TileDevice, units: int) -> float:
        """Seconds of a mini-batch, of all behind the first `units`."""

    def held_bytes(self, units: int) -> float:
        """What that takes of the device's memory."""

    def whole(self, device: TileDevice, costs: Costs, borders: tuple[int, ...]) -> TrailingChoice:
        """With tiles in these groups."""
