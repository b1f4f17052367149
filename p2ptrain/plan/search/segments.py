"""Candidates for questions too big for every subset: pipelines of neighbours in an order.

Along a few sensible orders of the devices, a dynamic programme over (first unit, position in the
order) cuts the model into stages whose groups are neighbours in that order; devices may be skipped
between groups. As in `partition.py` a suffix of the pipeline has a round time, from its first input
to its last gradient, and here also the end of its last all-reduce. For a head group with units
[i, j) before the suffix R, with c one micro-batch there and back on the head and hop on the link:

    gradient(i) = max( work of a round,  c + hop + max( gradient(R), link occupied ),
                       forced trips x (c + hop + latency(R)),  interface occupied )
    finish(i)   = max( gradient(i) + all-reduce,  (c + hop) / 2 + finish(R) )

All groups of all sizes at all positions and all ends j are compared in one NumPy expression for
each i. The values only rank candidates: bound and simulation judge them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from p2ptrain.plan.cost.draft import Draft, UnplacedGroup
from p2ptrain.plan.problem.candidates import even_window, segment_orders, useful_cuts
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.search.segment_tables import (
    Floats,
    SegmentTables,
    Stages,
    Wholes,
    group_options,
)
from p2ptrain.plan.search.shares import Drafter
from p2ptrain.plan.search.structure_moves import Layout
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.request import PlanMode

MAX_CUTS = 24
"""Places where a model may be cut; the climb afterwards moves borders unit by unit."""

MAX_POSITIONS = 256
"""Devices of an order that are looked at: beyond, the slowest could hardly earn their latency."""

KEPT = 6
"""Candidates of one split among all devices."""

SMALLER = (8, 16, 32, 64)
"""Numbers of devices, the fastest, among which candidates are found too: estimates do not see how
transfers of wide groups get in each other's way, and would always take more devices."""

KEPT_OF_SMALLER = 2
"""Candidates of each."""

HOPE = 1.3
"""A micro-batch size whose estimate is so far above the best one's is given up unsimulated."""

GRADIENT_WEIGHT = 1e-3
"""Of two suffixes that finish together, the one whose gradients come earlier leaves more room."""


Estimate: TypeAlias = tuple[float, Layout]
"""The seconds of a round that the programme estimates, and the pipeline."""


def promising_splits(question: Question, most: int) -> list[BatchSplit]:
    """The micro-batch sizes whose best pipeline along one order is fastest, simulated."""
    if len(question.splits) <= most:
        return list(question.splits)
    found: list[tuple[float, int, Layout]] = []
    for i, split in enumerate(question.splits):
        for seconds, layout in _best(question, split, _orders(question)[:1], 1):
            found.append((seconds, i, layout))
    ranked = []
    least = min((seconds for seconds, _, _ in found), default=0.0)
    for seconds, i, layout in found:
        if seconds <= HOPE * least:
            draft = _drafted(Drafter(question), question.splits[i], layout)
            if draft is not None:
                ranked.append((question.judge.seconds(draft), i))
    return [question.splits[i] for _, i in sorted(ranked)[:most]]


def segment_candidates(question: Question, split: BatchSplit) -> Iterator[Draft]:
    """The most promising pipelines of groups for one split, best first, all different.

    Nothing comes out of a private question: both its ends are the holder's.
    """
    orders, drafter = _orders(question), Drafter(question)
    chosen = _best(question, split, orders, KEPT)
    for size in SMALLER:
        if orders and size < len(orders[0]):
            chosen += _best(question, split, [orders[0][:size]], KEPT_OF_SMALLER)
    for layout in dict.fromkeys(layout for _, layout in chosen):
        draft = _drafted(drafter, split, layout)
        if draft is not None:
            yield draft


def _orders(question: Question) -> list[tuple[int, ...]]:
    if question.private:
        return []
    return segment_orders(question.cost, question.devices, MAX_POSITIONS)


def _best(
    question: Question, split: BatchSplit, orders: Sequence[tuple[int, ...]], most: int
) -> list[Estimate]:
    """The different pipelines of least estimate along `orders`."""
    cost, found = question.cost, dict[Layout, float]()
    cuts = (0, *useful_cuts(cost, MAX_CUTS), cost.unit_count)
    allocations = question.allocations if question.groups else frozenset()
    for order in orders:
        options = group_options(len(order), split, allocations)
        tables = SegmentTables(cost, split, order, cuts, options)
        for seconds, layout in _Programme(tables).candidates():
            found[layout] = min(found.get(layout, seconds), seconds)
    return sorted(((found[layout], layout) for layout in found), key=lambda one: one[0])[:most]


def _drafted(drafter: Drafter, split: BatchSplit, layout: Layout) -> Draft | None:
    """The pipeline with the shares of least bound."""
    if drafter.judge.cost.mode is PlanMode.ASYNC:
        dealing = [len(stage.devices) for stage in layout[1] if stage.deals]
        split = even_window(split, dealing or [1])
    return min(drafter.usual(split, *layout), key=drafter.judge.bound, default=None)


@dataclass(frozen=True, slots=True, eq=False)
class _Behind:
    """What may follow a head that ends at position e, for each cut j; all [C+1, n+1] by (j, e).

    Row C is the pipeline's end: nothing follows, and nothing takes time.

    Attributes:
        start: the position at which the following group begins.
        finish, gradient, latency: seconds of the best suffix from there.
        parts: into how many parts its head divides a micro-batch; `size`: its head's devices.
        there, back: seconds a byte on the link between them.
        delay: latency of both directions.
    """

    start: Wholes
    finish: Floats
    gradient: Floats
    latency: Floats
    parts: Floats
    size: Floats
    there: Floats
    back: Floats
    delay: Floats

    @classmethod
    def empty(cls, shape: tuple[int, int]) -> _Behind:
        """Only the pipeline's end is possible."""
        finish, gradient = np.full(shape, np.inf), np.full(shape, np.inf)
        finish[-1] = gradient[-1] = 0.0
        start = np.zeros(shape, dtype=np.int64)
        zeros, ones = (np.zeros(shape) for _ in range(4)), (np.ones(shape) for _ in range(2))
        return cls(start, finish, gradient, next(zeros), *ones, *zeros)


class _Programme:
    """The dynamic programme along one order."""

    def __init__(self, tables: SegmentTables) -> None:
        self.tables = tables
        self._cuts, self._count = len(tables.cuts) - 1, tables.count
        shape = self._cuts + 1, self._count + 1
        # A head is followed by the very next device, or the best of those further on.
        self._behind = _Behind.empty(shape), _Behind.empty(shape)
        # [3, C, n] the best suffix from (first cut, position): which of both, end cut, option
        self._choice = np.zeros((3, self._cuts, self._count), dtype=np.int64)
        neighbours = tables.rates[np.arange(self._count - 1), np.arange(1, self._count)]
        self._before = np.concatenate(([0.0], 1.0 / neighbours))  # [n] seconds a byte

    def candidates(self) -> Iterator[Estimate]:
        """The best pipeline for every size and kind of first group."""
        for first in range(self._cuts - 1, 0, -1):
            self._solve(first)
        occupied, arrival = self.tables.feed()
        stages = self.tables.stages(0)
        seconds = np.stack(
            [
                arrival
                + np.maximum(self._joined(0, stages, behind)[0], occupied + self._sent(behind))
                for behind in self._behind
            ]
        )  # [2, C, options, n]
        for option in range(len(self.tables.options)):
            which, end, k = np.unravel_index(seconds[:, :, option].argmin(), seconds[:, :, 0].shape)
            value = float(seconds[which, end, option, k])
            if np.isfinite(value):
                yield value, self._read(int(which), int(end) + 1, option, int(k))

    def _sent(self, behind: _Behind) -> Floats:
        """[C, options, n] seconds that the first group's outputs occupy the holder's uplink."""
        tables = self.tables
        carried = tables.rounds * tables.carried[1:, None, None]
        sent: Floats = carried * behind.there[1:, tables.ends] * tables.holders_part
        return sent

    def _solve(self, first: int) -> None:
        """Best suffixes that begin at cut `first`, for all positions."""
        stages = self.tables.stages(first)
        joined = [self._joined(first, stages, behind) for behind in self._behind]
        finish, gradient, latency = (np.stack(values) for values in zip(*joined, strict=True))
        score = finish + GRADIENT_WEIGHT * gradient  # [2, ends, options, n]
        best = score.reshape(-1, self._count).argmin(axis=0)
        which, end, option = np.unravel_index(best, score.shape[:3])
        self._choice[:, first] = which, end + first + 1, option
        at = which, end, option, np.arange(self._count)
        self._remember(first, finish[at], gradient[at], latency[at], option)

    def _joined(self, first: int, stages: Stages, behind: _Behind) -> tuple[Floats, Floats, Floats]:
        """(finish, gradient, latency) [ends, options, n] of heads with what follows them."""
        tables = self.tables
        at = slice(first + 1, None), tables.ends
        carried = tables.carried[first + 1 :, None, None]
        there, back = behind.there[at], behind.back[at]
        divided = carried / np.minimum(tables.hops, behind.parts[at])
        hop = stages.latency + divided * (there + back) + behind.delay[at]
        spread = tables.rounds * carried / np.minimum(tables.sizes, behind.size[at])
        occupied = spread * np.maximum(there, back)
        latency = hop + behind.latency[at]
        sent = tables.carried[first] * self._before + carried * there
        gradient = np.maximum(stages.work, hop + np.maximum(behind.gradient[at], occupied))
        gradient = np.maximum(gradient, stages.trips * latency)
        gradient = np.maximum(gradient, tables.rounds * sent / tables.sizes)
        finish = np.maximum(gradient + stages.reduce, hop / 2 + behind.finish[at])
        return finish, gradient, latency

    def _remember(
        self, first: int, finish: Floats, gradient: Floats, latency: Floats, option: Wholes
    ) -> None:
        """Make the suffixes that begin at cut `first` available as followers."""
        tables, last = self.tables, self._count - 1
        nearest = np.minimum(np.arange(self._count + 1), last)
        best = np.append(_best_from_here_on(finish), last)
        head = np.maximum(np.arange(self._count + 1) - 1, 0)
        for behind, start in zip(self._behind, (nearest, best), strict=True):
            behind.start[first] = start
            behind.finish[first], behind.gradient[first] = finish[start], gradient[start]
            behind.finish[first, -1] = behind.gradient[first, -1] = np.inf
            behind.latency[first] = latency[start]
            behind.parts[first] = tables.hops[option[start], 0]
            behind.size[first] = tables.sizes[option[start], 0]
            behind.there[first] = 1.0 / tables.rates[head, start]
            behind.back[first] = 1.0 / tables.rates[start, head]
            delay = tables.latencies[head, start] + tables.latencies[start, head]
            behind.delay[first] = delay

    def _read(self, which: int, end: int, option: int, position: int) -> Layout:
        """The pipeline that begins with that choice."""
        tables, first = self.tables, 0
        borders, stages = [0], list[UnplacedGroup]()
        while True:
            chosen = tables.options[option]
            devices = tuple(tables.order[position : position + chosen.size])
            stages.append(UnplacedGroup(devices, chosen.allocation))
            borders.append(int(tables.cuts[end]))
            if end == self._cuts:
                return tuple(borders), tuple(stages)
            position = int(self._behind[which].start[end, position + chosen.size])
            first = end
            which, end, option = (int(value) for value in self._choice[:, first, position])


def _best_from_here_on(values: Floats) -> Wholes:
    """[n] where the least value at or after each position is, the nearest of equals."""
    backwards = values[::-1]
    falls = backwards <= np.minimum.accumulate(backwards)
    places = np.where(falls, np.arange(len(values)), 0)
    best: Wholes = len(values) - 1 - np.maximum.accumulate(places)
    return best[::-1]
