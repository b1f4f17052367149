"""Tiles and the stages behind them: what a mini-batch takes, micro-batches one after the other.

Four micro-batches through tiles and one stage behind them, of depths 3 and 1, a tick a task:

    tiles    F0 F1 F2 B0 F3 B1 .  B2 .  B3 sum
    stage 1  .  F0 B0 F1 B1 F2 B2 F3 B3

The same where the stage's device has a tile too, of depths 1 and 1:

    tiles    F0 .  .  B0 F1 .  .  B1 F2 .  .  B2 F3 .  .  B3 sum
    stage 1  .  F0 B0 .  .  F1 B1 .  .  F2 B2 .  .  F3 B3

All devices with tiles work on the same micro-batch, so they are one device of the engine, and a
stage on one of them never computes beside the tiles. Stages behind, of one device or several, are
timed as in any round (`simulation/lanes.py`). Tiles share one uplink and one downlink for images,
last maps and their gradients, one device's after another's. Not modelled: halos and statistics
waiting for images that enter meanwhile; an image and its target for one device are two transfers; a
smaller last micro-batch takes its part of a full one's time; compression of maps. With `overlap` a
stage's all-reduce begins after its last backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup, alone, draft_groups, usual_depths
from p2ptrain.plan.simulation.engine import FEED, Engine, Lane, TransferRoute
from p2ptrain.plan.simulation.lanes import LaneBuilder, LanePart, Range, Routes, size_of
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.plan import Direction
from p2ptrain.tiling.planning.tiling_cost import Costs
from p2ptrain.tiling.planning.tiling_problem import Passage, Taker
from p2ptrain.tiling.planning.tiling_simulation import Simulated


@dataclass(frozen=True, slots=True)
class TrailingPipeline:
    """The stages behind the tiles.

    Attributes:
        borders: of their units, from the end of the tiles to the model's.
        groups: the devices of each stage, one or several.
    """

    borders: tuple[int, ...]
    groups: tuple[StageGroup, ...]

    @staticmethod
    def straight(
        split: BatchSplit, borders: Sequence[int], devices: Sequence[int]
    ) -> TrailingPipeline:
        """A device a stage."""
        return TrailingPipeline(tuple(borders), tuple(alone(split, device) for device in devices))

    @property
    def stages(self) -> list[tuple[StageGroup, tuple[int, int]]]:
        """(devices, units) of each."""
        return list(zip(self.groups, pairwise(self.borders), strict=True))


class TrailingChoice(NamedTuple):
    """What follows some tiles; infinite seconds where it does not fit the memory.

    Attributes:
        seconds: simulated, of a mini-batch, tiles included.
        depths: of the tiles and of each stage.
    """

    seconds: float
    row: TrailingPipeline
    depths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Passes:
    """What tiles take of a full micro-batch, in seconds.

    Attributes:
        forward, backward: computing, and what devices with tiles wait for each other.
        entering: the images on their way.
        leaving, returning: the last maps and their gradients, of what each device of the first
            stage behind the tiles has of a full micro-batch, in their order.
        filters: once a mini-batch, the sum of the filters' gradients.
        devices: those with tiles.
    """

    forward: float
    backward: float
    entering: Passage
    leaving: tuple[Passage, ...]
    returning: tuple[Passage, ...]
    filters: float
    devices: frozenset[int]

    @staticmethod
    def of(cost: CostModel, costs: Costs, simulated: Simulated, takers: Sequence[Taker]) -> Passes:
        """Of one grouping; `takers` are the devices of the first stage behind."""
        return Passes(
            simulated.forward,
            simulated.backward,
            costs.entering,
            tuple(costs.leaving_to(taker) for taker in takers),
            tuple(costs.returning_from(taker) for taker in takers),
            costs.filter_seconds,
            frozenset(cost.index(device.name) for device in costs.devices),
        )


def depths_that_fit(
    cost: CostModel, split: BatchSplit, row: TrailingPipeline, most_in_tiles: int
) -> tuple[int, ...] | None:
    """K_p of the tiles and of each stage, usual or lowered where memory is short; None = none does.

    Args:
        most_in_tiles: micro-batches of which tiles have room for what they keep.
    """
    first, *usual = usual_depths((_TILES, *row.groups), split.micro_batches)
    first = min(first, most_in_tiles)
    if first < 1:
        return None
    wanted = [min(depth, first) for depth in usual]  # never deeper than the stage before
    behind = draft_groups(cost, split, row.borders, row.groups, wanted)
    return None if behind is None else (first, *behind.warmup)


_TILES = StageGroup((-1,), (1,))
"""All devices with tiles, where nothing but their being one counts."""


def pipeline_seconds(
    cost: CostModel, split: BatchSplit, passes: Passes, row: TrailingPipeline, depths: Sequence[int]
) -> float:
    """Of a mini-batch, updates left out."""
    return pipeline_engine(cost, split, passes, row, depths).run()


def pipeline_engine(
    cost: CostModel,
    split: BatchSplit,
    passes: Passes,
    row: TrailingPipeline,
    depths: Sequence[int],
    *,
    record: bool = False,
) -> Engine:
    """What times a mini-batch, updates left out.

    Lane 0 is the tiles'; then one a device, stage by stage in the order of their devices.
    """
    tiles = alone(split, len(cost.devices))
    draft = Draft(split, (0, *row.borders), (tiles, *row.groups), tuple(depths))
    sums = {0: passes.filters} | {
        p: sum_seconds(cost, group, *units)
        for p, (group, units) in enumerate(row.stages, 1)
        if len(group.devices) > 1
    }
    return Engine(_TiledLanes(cost, draft, passes).lanes(), sums, record)


def tile_parts(split: BatchSplit) -> list[float]:
    """What tiles take of each micro-batch, by a full one's."""
    return [1.0] * (split.micro_batches - 1) + [split.last_samples / split.first_samples]


def sum_seconds(cost: CostModel, group: StageGroup, first: int, end: int) -> float:
    """Summing a stage's gradients; with `overlap` no less than its messages take any processor."""
    wire = cost.all_reduce_seconds(group.devices, first, end)
    if cost.overlap is None:
        return wire
    count = len(group.devices)
    buckets = cost.overlap.buckets(first, end, cost.bucket_sizes(group.devices))
    return max(wire, *(cost.overlap.reduce_seconds(d, count, buckets) for d in group.devices))


class _TiledLanes(LaneBuilder):
    """Stage 0 of the draft is the tiles', on a device whose number no other has."""

    def __init__(self, cost: CostModel, draft: Draft, passes: Passes) -> None:
        self._passes = passes
        # Those with tiles are together one more device, whose interfaces have numbers of their
        # own: what goes from one number to the same takes the engine no time.
        self._tiles, self._inlet = len(cost.devices), len(cost.devices) + 1
        super().__init__(cost, draft)

    def lanes(self) -> list[Lane]:
        """The tiles' first."""
        lanes = super().lanes()
        for lane in lanes:
            lane.device = self._uplink(lane.device)
        return lanes

    def _uplink(self, device: int) -> int:
        return self._tiles if device in self._passes.devices else device

    def _downlink(self, device: int) -> int:
        return self._inlet if self._uplink(device) == self._tiles else device

    def seconds(self, part: LanePart, samples: Range) -> tuple[float, float]:
        """See `LaneBuilder`."""
        if part.stage > 0:
            return super().seconds(part, samples)
        taken, full = size_of(samples), size_of(part.full)
        return taken * self._passes.forward / full, taken * self._passes.backward / full

    def routes(
        self, carries: Direction, sender: LanePart, receiver: LanePart, samples: int
    ) -> Routes:
        """See `LaneBuilder`."""
        if not samples:
            return ()
        if sender.stage > 0 and receiver.stage > 0:
            routes = super().routes(carries, sender, receiver, samples)
        else:
            routes = (self._passed(carries, sender, receiver, samples),)
        for route in routes:
            route.uplink = self._uplink(sender.device)
            route.downlink = self._downlink(receiver.device)
        return routes

    def _passed(
        self, carries: Direction, sender: LanePart, receiver: LanePart, samples: int
    ) -> TransferRoute:
        """Out of the tiles or back, of so many of the samples of a device behind them."""
        passages, other = self._passes.leaving, receiver
        if receiver.stage == 0:
            passages, other = self._passes.returning, sender
        passage = passages[other.lane - 1]
        ends = sender.lane, receiver.lane, sender.device, receiver.device
        seconds = samples * passage.carried_seconds / size_of(other.full)
        return TransferRoute(carries, *ends, seconds, passage.latency_s)

    def feed(self, part: LanePart) -> list[TransferRoute] | None:
        """What the holder sends: images to the tiles, targets to the last stage but its own."""
        feed = super().feed(part) if part.stage > 0 else self._images(part)
        for route in feed or ():
            route.uplink = self._uplink(self.cost.holder)
            route.downlink = self._downlink(part.device)
        return feed

    def _images(self, part: LanePart) -> list[TransferRoute]:
        passage = self._passes.entering
        full, last = (
            TransferRoute(
                "input",
                FEED,
                part.lane,
                self.cost.holder,
                part.device,
                size_of(samples) * passage.carried_seconds / size_of(part.full),
                passage.latency_s,
            )
            for samples in (part.full, part.last)
        )
        return self.by_task((full, full), (last, last))
