"""Tiles, and stages behind them on devices that have none.

While these compute one micro-batch, the tiles already compute the next. Tried are one to four such
devices, the fastest or the slowest ones, and all numbers of tiled units. Behind the tiles is a
straight pipeline, the best one of all these devices (`plan/problem/order_cuts.py`), or one stage
that they share: they divide each micro-batch by samples, or take whole ones in turn, by their
speeds (`plan/search/shares.py`). With a single micro-batch only dividing it gives all of them work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import permutations
from math import inf, isfinite

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import StageGroup, UnplacedGroup, place_seconds
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.problem.order_cuts import OrderCuts
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.search.shares import ShareDivider
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.tiling.planning.tiled_pipeline import (
    Passes,
    TrailingChoice,
    TrailingPipeline,
    depths_that_fit,
    pipeline_seconds,
    tile_parts,
)
from p2ptrain.tiling.planning.tiling_cost import Costs
from p2ptrain.tiling.planning.tiling_problem import TileDevice, TilingProblem
from p2ptrain.tiling.planning.tiling_search import best_of, unit_counts
from p2ptrain.tiling.planning.tiling_setting import (
    Tiling,
    TilingCandidate,
    TilingRequest,
    TilingSetting,
)
from p2ptrain.tiling.planning.tiling_simulation import lower_bound, simulate_tiles

MAX_IN_A_ROW = 2

MAX_SHARING = 4


@dataclass(frozen=True)  # without slots: it keeps what it has computed
class TrailingStages:
    """See the module.

    Attributes:
        devices: all of them have a part.
        allocations: how they may share a stage.
    """

    cost: CostModel
    split: BatchSplit
    devices: tuple[int, ...]
    allocations: frozenset[Allocation]

    @property
    def are_worth_asking(self) -> bool:
        """Whether there is any way for them to save time."""
        return self._may_be_a_row or bool(self._ways)

    def rows(self, first: int) -> list[TrailingPipeline]:
        """Ways to compute units `first` to the last that memory may allow; the pipeline first."""
        row = self._row(first)
        found = [] if row is None else [TrailingPipeline.straight(self.split, *row[1:])]
        groups = self._groups(first)
        return found + [
            TrailingPipeline((first, self.cost.unit_count), (group,)) for group in groups
        ]

    def least_seconds(self, first: int) -> float:
        """What they take for a mini-batch, whichever way; of the pipeline about that."""
        units = first, self.cost.unit_count
        shared = [
            max(
                place_seconds(self.cost, self.split, group, place, units)
                for place in range(len(group.devices))
            )
            for group in self._groups(first)
        ]
        row = self._row(first)
        return min(inf if row is None else row[0], *shared, inf)

    @property
    def _may_be_a_row(self) -> bool:
        """Tiles and stages compute side by side only where there are several micro-batches."""
        return self.split.micro_batches > 1 and len(self.devices) <= MAX_IN_A_ROW

    @property
    def _ways(self) -> Sequence[Allocation]:
        """To share a stage."""
        ways = [Allocation.SAMPLES, Allocation.MICRO_BATCHES]
        return [way for way in ways if way in self.allocations and self._has_enough(way)]

    def _has_enough(self, way: Allocation) -> bool:
        """Something for each; shares of whole micro-batches need several, as a row does."""
        split = self.split
        pieces = split.micro_batch if way is Allocation.SAMPLES else split.micro_batches
        return 2 <= len(self.devices) <= min(MAX_SHARING, pieces)

    def _groups(self, first: int) -> list[StageGroup]:
        """All of them in one stage, each way that memory allows."""
        units = first, self.cost.unit_count
        found = [
            self._divider.group(self.split, UnplacedGroup(self.devices, way), units)
            for way in self._ways
        ]
        return [group for group in found if group is not None]

    @cached_property
    def _divider(self) -> ShareDivider:
        return ShareDivider(Question(Judge(self.cost, 0), [self.split], self.devices))

    @cached_property
    def _cuts(self) -> OrderCuts:
        return OrderCuts(self.cost, self.split)

    def _row(self, first: int) -> tuple[float, tuple[int, ...], tuple[int, ...]] | None:
        """(about its seconds, borders, devices) of the best pipeline of all devices."""
        places = range(first, self.cost.unit_count + 1)
        if not self._may_be_a_row or len(self.devices) >= len(places):
            return None
        rows = list(permutations(self.devices))
        orders = [tuple(UnplacedGroup((d,)) for d in devices) for devices in rows]
        values, borders = self._cuts.solve(orders, places, fed=False)
        best = int(values.argmin())
        if not isfinite(values[best]):
            return None
        return float(values[best]), tuple(borders[best].tolist()), rows[best]


MIN_TILES = 2

LITTLE = 1.1
"""Devices that differ by less are taken for equal: it is all the same which have tiles."""


def best_pipelined(setting: TilingSetting, asked: TilingRequest) -> Tiling | None:
    """The fastest below the seconds asked for; None where there is none.

    Args:
        setting: all of its devices have a part.
    """
    return best_of(_candidates(setting, asked), asked, [])


def _candidates(setting: TilingSetting, asked: TilingRequest) -> Iterator[TilingCandidate]:
    for behind in _choices(setting):
        followers = TrailingStages(setting.cost, setting.split, behind, asked.allocations)
        if followers.are_worth_asking:
            with_tiles = [device for device in setting.devices if device not in behind]
            less = TilingSetting.of(setting.cost, setting.network, setting.split, with_tiles)
            yield from _in_front(less, followers, asked)


def _choices(setting: TilingSetting) -> Iterator[tuple[int, ...]]:
    """Devices that may stand behind the tiles."""
    cost, samples = setting.cost, setting.split.first_samples

    def seconds(device: int) -> tuple[float, int]:
        return sum(cost.stage_seconds(device, 0, cost.unit_count, samples)), device

    ordered = tuple(sorted(setting.devices, key=seconds))
    most = max(MAX_IN_A_ROW, MAX_SHARING)
    for count in range(1, min(most, len(ordered) - MIN_TILES) + 1):
        fastest, slowest = ordered[:count], ordered[-count:]
        yield fastest
        if seconds(slowest[-1])[0] > LITTLE * seconds(fastest[0])[0]:
            yield slowest


def _in_front(
    setting: TilingSetting, followers: TrailingStages, asked: TilingRequest
) -> Iterator[TilingCandidate]:
    """All devices of the setting have tiles."""
    devices = sorted(setting.tile_devices(), key=lambda d: (d.slowdown, d.name))
    if asked.grid is not None:  # who could have one of the tiles asked for has one
        tiles = asked.grid[0] * asked.grid[1]
        devices = devices[:tiles] if tiles <= len(devices) else []
    problem = setting.problem.among(devices)
    for count in unit_counts(problem, asked) if devices else ():
        rows = followers.rows(count)
        if rows:
            tiled = problem.first_units(count)
            yield TilingCandidate(
                problem=tiled,
                devices=tuple(devices),
                whole=partial(_fastest, setting, rows),
                bound=_bound(setting, followers, tiled, devices, asked.pieces),
                behind=setting.tile_device(rows[0].groups[0].devices[0]),
                holder=setting.tile_device(setting.cost.holder),
            )


def _bound(
    setting: TilingSetting,
    followers: TrailingStages,
    tiled: TilingProblem,
    devices: Sequence[TileDevice],
    pieces: float,
) -> float:
    """Before what is behind can begin, and after it has ended, tiles have something to do."""
    behind, last = followers.least_seconds(len(tiled.network.units)), tile_parts(setting.split)[-1]

    def tiles(pieces: float) -> float:
        return lower_bound(tiled, devices, least=len(devices), pieces=pieces, messages=True)

    return max(tiles(pieces), behind + tiles(last))


def _fastest(
    setting: TilingSetting,
    rows: Sequence[TrailingPipeline],
    costs: Costs,
    borders: tuple[int, ...],
) -> TrailingChoice:
    """Of what may follow these tiles."""
    cost, split, simulated = setting.cost, setting.split, simulate_tiles(costs, borders)
    most = _most_in_flight(costs, borders, split.micro_batches)
    best = TrailingChoice(inf, rows[0])
    for row in rows:
        depths = depths_that_fit(cost, split, row, most)
        if depths is not None:
            passes = Passes.of(cost, costs, simulated, setting.takers(row.groups[0]))
            seconds = pipeline_seconds(cost, split, passes, row, depths)
            best = min(best, TrailingChoice(seconds, row, depths), key=lambda one: one.seconds)
    return best


def _most_in_flight(costs: Costs, borders: tuple[int, ...], micro_batches: int) -> int:
    """Micro-batches of which all devices with tiles have room for what they keep."""
    filters = costs.problem.filters.trained
    rooms = [
        (device.memory_bytes - filters) / max(held - filters, 1.0)
        for device, held in zip(costs.devices, costs.memory(borders), strict=True)
    ]
    return int(min(*rooms, micro_batches))
