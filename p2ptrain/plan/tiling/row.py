"""Tiles and the stages behind them: what a mini-batch takes, micro-batches one after the other.

Four micro-batches through tiles and one stage behind them, of depths 3 and 1, a tick a task:

    tiles    F0 F1 F2 B0 F3 B1 .  B2 .  B3 sum
    stage 1  .  F0 B0 F1 B1 F2 B2 F3 B3

The same where the stage's device has a tile too, of depths 1 and 1:

    tiles    F0 .  .  B0 F1 .  .  B1 F2 .  .  B2 F3 .  .  B3 sum
    stage 1  .  F0 B0 .  .  F1 B1 .  .  F2 B2 .  .  F3 B3

All devices with tiles work on the same micro-batch, so that they are one device of the engine, and
a stage on one of them never computes beside the tiles. They have one uplink and one downlink for
images, last maps and their gradients, one device's after another's. What remains inexact: halos and
statistics, part of the tiles' tasks, do not wait for images that enter meanwhile; an image and its
target for one device are two transfers; a smaller last micro-batch takes tiles its part of a full
one's time; maps and their gradients are not compressed, with `overlap` either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.overlap import Direction
from p2ptrain.plan.schedule import usual_warmup
from p2ptrain.plan.simulation.engine import FEED, Engine, Lane, Route
from p2ptrain.plan.simulation.lanes import route, stage_tasks
from p2ptrain.plan.split import BatchSplit
from p2ptrain.plan.tiling.cost import Costs
from p2ptrain.plan.tiling.exchanges import Passage
from p2ptrain.plan.tiling.simulate import Simulated


@dataclass(frozen=True, slots=True)
class Row:
    """The stages behind the tiles.

    Attributes:
        borders: of their units, from the end of the tiles to the model's.
        devices: by stage.
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
        entering, leaving, returning: the images, the last maps and their gradients on their way.
        filters: once a mini-batch, the sum of the filters' gradients.
        devices: those with tiles.
    """

    forward: float
    backward: float
    entering: Passage
    leaving: Passage
    returning: Passage
    filters: float
    devices: frozenset[int]

    @staticmethod
    def of(cost: CostModel, costs: Costs, simulated: Simulated) -> Passes:
        """Of one grouping."""
        return Passes(
            simulated.forward,
            simulated.backward,
            costs.entering,
            costs.leaving,
            costs.returning,
            costs.filter_seconds,
            frozenset(cost.index(device.name) for device in costs.devices),
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
    return row_engine(cost, split, passes, row, depths).run()


def row_engine(
    cost: CostModel,
    split: BatchSplit,
    passes: Passes,
    row: Row,
    depths: Sequence[int],
    *,
    record: bool = False,
) -> Engine:
    """What times a mini-batch, updates left out; lane 0 is the tiles'."""
    return Engine(_Lanes(cost, split, passes, row).of(depths), {0: passes.filters}, record)


def tile_parts(split: BatchSplit) -> list[float]:
    """What tiles take of each micro-batch, by a full one's."""
    sizes = [split.samples(m) for m in range(split.micro_batches)]
    return [size / split.first_samples for size in sizes]


def stage_seconds(cost: CostModel, split: BatchSplit, device: int, first: int, end: int) -> float:
    """What a device computes of units [first, end) in a mini-batch."""
    full = sum(cost.stage_seconds(device, first, end, split.first_samples))
    last = sum(cost.stage_seconds(device, first, end, split.last_samples))
    return (split.micro_batches - 1) * full + last


class _Lanes:
    """The engine's lanes of one question."""

    def __init__(self, cost: CostModel, split: BatchSplit, passes: Passes, row: Row) -> None:
        self._cost, self._passes, self._row = cost, passes, row
        self._parts = tile_parts(split)
        self._sizes = [split.first_samples] * (split.micro_batches - 1) + [split.last_samples]
        # Those with tiles are together one more device, whose interfaces have numbers of their
        # own: what goes from one number to the same takes the engine no time.
        self._tiles, self._inlet = len(cost.devices), len(cost.devices) + 1
        self._last = len(row.devices)

    def of(self, depths: Sequence[int]) -> list[Lane]:
        """The tiles' first, then each stage's."""
        return [self._lane(p, depth) for p, depth in enumerate(depths)]

    def _lane(self, p: int, depth: int) -> Lane:
        count, is_last = len(self._sizes), p == self._last
        routes: list[Sequence[Route]] = [()] * (2 * count)
        if not is_last:
            routes[0::2] = self._routes("output", p, p + 1)
        if p > 0:
            routes[1::2] = self._routes("gradient", p, p - 1)
        feed = self._feed(p)
        inputs = (p > 0) + (feed is not None)
        return Lane(
            number=p,
            stage=p,
            device=self._device(p),
            tasks=stage_tasks(count, depth),
            seconds=self._seconds(p),
            missing=[inputs, 0 if is_last else 1] * count,
            routes=routes,
            feed=feed,
        )

    def _device(self, p: int) -> int:
        return self._uplink(self._row.devices[p - 1]) if p else self._tiles

    def _uplink(self, device: int) -> int:
        return self._tiles if device in self._passes.devices else device

    def _downlink(self, p: int) -> int:
        device = self._device(p)
        return self._inlet if device == self._tiles else device

    def _seconds(self, p: int) -> list[float]:
        """By task."""
        if p == 0:
            each = self._passes.forward, self._passes.backward
            return [seconds * part for part in self._parts for seconds in each]
        stage = self._row.stages[p - 1]
        return [s for size in self._sizes for s in self._cost.stage_seconds(*stage, size)]

    def _feed(self, p: int) -> list[Route] | None:
        """What the holder sends: images to the tiles, targets to the last stage but its own."""
        holder = self._cost.holder
        ends = FEED, p, self._uplink(holder), self._downlink(p)
        if p == 0:
            fed = [self._passed("input", ends, self._passes.entering, part) for part in self._parts]
        elif p == self._last and self._row.devices[-1] != holder:
            link = self._cost.link(holder, self._row.devices[-1])
            each = self._cost.profile.target_bytes / link.bytes_per_s
            fed = [Route("input", *ends, size * each, link.latency_s) for size in self._sizes]
        else:
            return None
        return [route for route in fed for _ in range(2)]  # by task, though only forwards have any

    def _routes(self, carries: Direction, p: int, other: int) -> list[Sequence[Route]]:
        """By micro-batch."""
        ends = p, other, self._device(p), self._downlink(other)
        if 0 in (p, other):
            passage = self._passes.leaving if p == 0 else self._passes.returning
            return [(self._passed(carries, ends, passage, part),) for part in self._parts]
        return [(self._between(carries, p, other, size),) for size in self._sizes]

    def _passed(
        self,
        carries: Direction | Literal["input"],
        ends: tuple[int, int, int, int],
        passage: Passage,
        part: float,
    ) -> Route:
        return Route(carries, *ends, part * passage.carried_seconds, passage.latency_s)

    def _between(self, carries: Direction, p: int, other: int, size: int) -> Route:
        """From a stage behind the tiles to another."""
        cut, devices = self._row.borders[max(p, other) - 1], self._row.devices
        made = route(self._cost, carries, (p, other, devices[p - 1], devices[other - 1]), cut, size)
        made.uplink, made.downlink = self._device(p), self._downlink(other)
        return made
