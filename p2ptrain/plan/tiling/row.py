"""A straight pipeline behind the tiles: what a mini-batch takes, micro-batches one after the other.

Four micro-batches through tiles and one stage behind them, of depths 3 and 1, a tick a task:

    tiles    F0 F1 F2 B0 F3 B1 .  B2 .  B3 sum
    stage 1  .  F0 B0 F1 B1 F2 B2 F3 B3

All devices with tiles work on the same micro-batch, so that they are one lane of the engine; the
stages' devices have no tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.overlap import Direction
from p2ptrain.plan.schedule import usual_warmup
from p2ptrain.plan.simulation.engine import FEED, Engine, Lane, Route
from p2ptrain.plan.simulation.lanes import route, stage_tasks
from p2ptrain.plan.split import BatchSplit
from p2ptrain.plan.tiling.cost import Costs
from p2ptrain.plan.tiling.simulate import Simulated


@dataclass(frozen=True, slots=True)
class Row:
    """The stages behind the tiles.

    Attributes:
        borders: of their units, from the end of the tiles to the model's.
        devices: by stage; none has tiles.
    """

    borders: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def stages(self) -> list[tuple[int, int, int]]:
        """(device, first unit, end) of each."""
        units = pairwise(self.borders)
        return [(d, first, end) for d, (first, end) in zip(self.devices, units, strict=True)]


@dataclass(frozen=True, slots=True)
class Passes:
    """What tiles take of a full micro-batch, in seconds.

    Attributes:
        forward, backward: computing, and what devices with tiles wait for each other.
        entering, leaving: the images on their way; the last maps, or their gradients.
        filters: once a mini-batch, the sum of the filters' gradients.
    """

    forward: float
    backward: float
    entering: float
    leaving: float
    filters: float

    @staticmethod
    def of(costs: Costs, simulated: Simulated) -> Passes:
        """Of one grouping."""
        return Passes(
            simulated.forward,
            simulated.backward,
            costs.entering_seconds,
            costs.leaving_seconds,
            costs.filter_seconds,
        )


def depths_that_fit(
    cost: CostModel, split: BatchSplit, row: Row, most_in_tiles: int
) -> tuple[int, ...] | None:
    """K_p of the tiles and of each stage, usual or lowered where memory is short; None = none does.

    Args:
        most_in_tiles: micro-batches of which tiles have room for what they keep.
    """
    room = [most_in_tiles]
    for device, first, end in row.stages:
        samples = cost.samples_that_fit(first, end, cost.devices[device].memory_bytes)
        room.append(split.deepest(samples))
    depths: list[int] = []
    for usual, most in zip(usual_warmup(len(room), split.micro_batches), room, strict=True):
        depths.append(min(usual, most, *depths[-1:]))  # never deeper than the stage before
    return tuple(depths) if min(depths) > 0 else None


def row_seconds(
    cost: CostModel, split: BatchSplit, passes: Passes, row: Row, depths: Sequence[int]
) -> float:
    """Of a mini-batch, updates left out."""
    lanes = _Lanes(cost, split, passes, row).of(depths)
    return Engine(lanes, {0: passes.filters}).run()


class _Lanes:
    """The engine's lanes of one question."""

    def __init__(self, cost: CostModel, split: BatchSplit, passes: Passes, row: Row) -> None:
        self._cost, self._passes, self._row = cost, passes, row
        self._sizes = [split.first_samples] * (split.micro_batches - 1) + [split.last_samples]
        self._parts = [size / split.first_samples for size in self._sizes]
        tiles = len(cost.devices)  # together they are one more device
        self._devices = (tiles, *row.devices)

    def of(self, depths: Sequence[int]) -> list[Lane]:
        """The tiles' first, then each stage's."""
        return [self._lane(p, depth) for p, depth in enumerate(depths)]

    def _lane(self, p: int, depth: int) -> Lane:
        count, is_last = len(self._sizes), p == len(self._devices) - 1
        routes: list[Sequence[Route]] = [()] * (2 * count)
        if not is_last:
            routes[0::2] = self._routes("output", p, p + 1)
        if p > 0:
            routes[1::2] = self._routes("gradient", p, p - 1)
        return Lane(
            number=p,
            stage=p,
            device=self._devices[p],
            tasks=stage_tasks(count, depth),
            seconds=self._seconds(p),
            missing=[1, 0 if is_last else 1] * count,
            routes=routes,
            feed=None if p else self._images(),
        )

    def _seconds(self, p: int) -> list[float]:
        """By task."""
        if p == 0:
            each = self._passes.forward, self._passes.backward
            return [seconds * part for part in self._parts for seconds in each]
        stage = self._row.stages[p - 1]
        return [s for size in self._sizes for s in self._cost.stage_seconds(*stage, size)]

    def _images(self) -> list[Route]:
        """By task, though only forwards have any; their sender's interface is nobody else's."""
        tiles, seconds = self._devices[0], self._passes.entering
        ends = FEED, 0, tiles + 1, tiles
        images = [Route("input", *ends, seconds * part, 0.0) for part in self._parts]
        return [route for route in images for _ in range(2)]

    def _routes(self, carries: Direction, p: int, other: int) -> list[Sequence[Route]]:
        """By micro-batch."""
        ends = p, other, self._devices[p], self._devices[other]
        if 0 in (p, other):
            leaving = self._passes.leaving
            return [(Route(carries, *ends, leaving * part, 0.0),) for part in self._parts]
        cut = self._row.borders[max(p, other) - 1]
        return [(route(self._cost, carries, ends, cut, size),) for size in self._sizes]
