"""Tiles with a pipeline behind them: some devices have no tile, and what is not tiled instead.

While they compute one micro-batch, the tiles already compute the next. Tried are one or two such
devices, the fastest or the slowest ones, and all numbers of tiled units, each with the best
straight pipeline of the others (`shared.partition`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from p2ptrain.plan.shared.partition import Partition, Suffix, every_subset
from p2ptrain.plan.tiling.cost import Costs
from p2ptrain.plan.tiling.problem import TileDevice, TilingProblem
from p2ptrain.plan.tiling.row import Passes, Row, depths_that_fit, row_seconds
from p2ptrain.plan.tiling.search import Asked, Candidate, Tiling, best_of, unit_counts
from p2ptrain.plan.tiling.setting import Setting
from p2ptrain.plan.tiling.simulate import lower_bound, simulate

MOST_BEHIND = 2
LEAST_TILES = 2
LITTLE = 1.1
"""Devices that differ by less are taken for equal: it is all the same which have tiles."""


@dataclass(frozen=True, slots=True)
class Pipelined:
    """A way to run all units.

    Attributes:
        tiling: its seconds are those of a mini-batch, all stages included.
        row: what follows.
        depths: of the tiles and of each stage.
    """

    tiling: Tiling
    row: Row
    depths: tuple[int, ...]


def best_pipelined(setting: Setting, asked: Asked) -> Pipelined | None:
    """The fastest below the seconds asked for; None where there is none.

    Args:
        setting: all of its devices have a part.
    """
    best: Pipelined | None = None
    for behind in _choices(setting):
        with_tiles = [device for device in setting.devices if device not in behind]
        less = Setting.of(setting.cost, setting.network, setting.split, with_tiles)
        search = _Search(less, behind)
        if best is not None:
            asked = replace(asked, below=best.tiling.seconds)
        best = search.best(asked) or best
    return best


def _choices(setting: Setting) -> Iterator[tuple[int, ...]]:
    """Devices that may stand behind the tiles."""
    cost, samples = setting.cost, setting.split.first_samples

    def seconds(device: int) -> tuple[float, int]:
        return sum(cost.stage_seconds(device, 0, cost.unit_count, samples)), device

    ordered = tuple(sorted(setting.devices, key=seconds))
    for count in range(1, min(MOST_BEHIND, len(ordered) - LEAST_TILES) + 1):
        fastest, slowest = ordered[:count], ordered[-count:]
        yield fastest
        if seconds(slowest[-1])[0] > LITTLE * seconds(fastest[0])[0]:
            yield slowest


class _Search:
    """With these devices behind the tiles, and the others in front."""

    def __init__(self, setting: Setting, behind: tuple[int, ...]) -> None:
        self._setting = setting
        by_speed = sorted(setting.tile_devices(), key=lambda d: (d.slowdown, d.name))
        self._devices: Sequence[TileDevice] = by_speed
        found = list(every_subset(Partition(setting.cost, setting.split), behind))
        self._suffixes = found[-len(behind) :]  # those of all devices, by head

    def best(self, asked: Asked) -> Pipelined | None:
        """The fastest below the seconds asked for, if there is one."""
        # As slow as it is beside the fastest of these devices.
        asked = replace(asked, holder=self._setting.tile_device(self._setting.cost.holder))
        tiling = best_of(self._candidates(asked), asked, [])
        if tiling is None:
            return None
        units, names = tiling.borders[-1], [device.name for device in self._devices]
        devices = [self._devices[names.index(name)] for name in tiling.devices]
        row, tiled = self._row(units), self._setting.problem.first_units(units)
        depths = self._depths(row, tiled, devices, tiling.memory_bytes)
        assert depths is not None
        return Pipelined(tiling, row, depths)

    def _candidates(self, asked: Asked) -> Iterator[Candidate]:
        problem, devices = self._setting.problem, self._devices
        if asked.grid is not None:
            tiles = asked.grid[0] * asked.grid[1]
            if tiles > len(devices):
                return  # a device that could have one of them has one
            devices = devices[:tiles]
            problem = problem.among(devices)
        for count in unit_counts(problem, asked):
            tiled, behind = problem.first_units(count), self._suffix(count).value[count]
            row = self._row(count)
            least = lower_bound(
                tiled, devices, least=len(devices), pieces=asked.pieces, messages=True
            )
            yield Candidate(
                problem=tiled,
                devices=tuple(devices),
                whole=partial(self._seconds, row),
                bound=max(least, float(behind)),
                behind=self._setting.tile_device(row.devices[0]),
            )

    def _seconds(self, row: Row, costs: Costs, borders: tuple[int, ...]) -> float:
        depths = self._depths(row, costs.problem, costs.devices, costs.memory(borders))
        if depths is None:
            return inf
        setting = self._setting
        passes = Passes.of(setting.cost, costs, simulate(costs, borders))
        return row_seconds(setting.cost, setting.split, passes, row, depths)

    def _depths(
        self,
        row: Row,
        tiled: TilingProblem,
        devices: Sequence[TileDevice],
        held_bytes: Sequence[float],
    ) -> tuple[int, ...] | None:
        """`held_bytes`: by device, with one micro-batch in flight."""
        filters = tiled.filter_memory_bytes
        rooms = [
            (device.memory_bytes - filters) / max(held - filters, 1.0)
            for device, held in zip(devices, held_bytes, strict=True)
        ]
        most = int(min(*rooms, self._setting.split.micro_batches))
        return depths_that_fit(self._setting.cost, self._setting.split, row, most)

    def _suffix(self, first: int) -> Suffix:
        return min(self._suffixes, key=lambda suffix: suffix.value[first])

    def _row(self, first: int) -> Row:
        """The best pipeline of units `first` to the last."""
        return Row(*self._suffix(first).placement(first))
