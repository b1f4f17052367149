"""The best straight pipeline: one device a stage, over subsets and orders of devices.

Small questions are enumerated. Larger ones: likely orders for every micro-batch size, then every
subset and order (up to 8 devices) for the most promising sizes, each by the dynamic programme of
`partition.py`; the candidates are judged by bound and simulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import combinations, permutations
from math import comb, isfinite, perm

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft
from p2ptrain.plan.problem.candidates import likely_orders, useful_cuts, whole_seconds
from p2ptrain.plan.problem.judge import Judge, Judged
from p2ptrain.plan.problem.partition import (
    DevicePlacement,
    Partition,
    Suffix,
    every_subset,
    in_order,
)
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.types.allocation import BatchSplit

MAX_ENUMERATED = 300
"""Placements of one batch split that are enumerated rather than searched."""

MAX_SUBSET_DEVICES = 8
"""Devices whose subsets are all tried: 2^7 · 8 extensions of about a tenth of a millisecond."""

MAX_SCREENED_DEVICES = 16
"""Devices among which the promising micro-batch sizes are found."""

MAX_CUTS = 64
"""Of larger models only the most useful cuts are tried: extensions cost their square."""

MAX_ORDERED_DEVICES = 64
"""Devices of an order, the fastest: each is tried before every later one."""

KEPT = 12
"""Candidates of one dynamic programme."""

PROMISING = 3
"""Micro-batch sizes that are searched thoroughly."""


@dataclass(frozen=True, slots=True)
class StraightSearch:
    """One search; `pool` keeps every candidate of the dynamic programmes."""

    question: Question
    pools: dict[BatchSplit, dict[Draft, None]] = field(default_factory=dict)

    @property
    def cost(self) -> CostModel:
        """The question's cost model."""
        return self.question.cost

    @property
    def judge(self) -> Judge:
        """The question's judge."""
        return self.question.judge

    @property
    def _inner(self) -> tuple[int, ...]:
        """Devices that may have a stage which is not pinned to the holder."""
        return tuple(
            d
            for d in self.question.devices
            if not (self.question.private and d == self.cost.holder)
        )

    @property
    def _cuts(self) -> tuple[int, ...]:
        """Where the dynamic programmes may cut; the climb moves borders unit by unit."""
        return (0, *useful_cuts(self.cost, MAX_CUTS), self.cost.unit_count)

    def winners(self, best: Judged | None = None) -> list[Judged]:
        """`best` and the fastest candidates, fastest first; nothing where nothing fits."""
        if self._inner:
            if self.count_placements() <= MAX_ENUMERATED:
                for split in self.question.splits:
                    self._collect(split, self.every_placement())
            else:
                self._search()
        return self._winners(best)

    @property
    def pool(self) -> Iterator[Draft]:
        """Every candidate found by value."""
        return (draft for pool in self.pools.values() for draft in pool)

    def _winners(self, best: Judged | None) -> list[Judged]:
        """`best` and the best candidate of every split, fastest first.

        The most promising splits share a part of the budget; the others get one simulation each.
        Bounds alone would not do: they are lower for small micro-batches and distant devices.
        """
        pools = [pool for pool in self.pools.values() if pool]
        firsts = [(self.judge.best_of([self._least(pool)]), pool) for pool in pools]
        ranked = [(winner, pool) for winner, pool in firsts if winner is not None]
        ranked.sort(key=lambda pair: pair[0].seconds)
        winners = [] if best is None else [best]
        budget = self.judge.budget_tasks
        for i, (winner, pool) in enumerate(ranked):
            if i < PROMISING:
                reserve = int(budget * (1 - (i + 1) / PROMISING))
                winner = self._best_of_pool(pool, winner, reserve)
            winners.append(winner)
        return sorted(winners, key=lambda judged: judged.seconds)

    def _least(self, pool: Iterable[Draft]) -> Draft:
        return min(pool, key=self.judge.bound)

    def _best_of_pool(self, pool: Iterable[Draft], winner: Judged, reserve: int) -> Judged:
        """First one candidate of every set of devices, then all."""
        by_set: dict[frozenset[int], list[Draft]] = {}
        for draft in pool:
            by_set.setdefault(frozenset(draft.devices), []).append(draft)
        firsts = [self._least(drafts) for drafts in by_set.values()]
        best = self.judge.best_of(firsts, winner, reserve)
        return self.judge.best_of(pool, best, reserve) or winner

    def count_placements(self) -> int:
        """How many `every_placement` gives."""
        units, devices = self.cost.unit_count, len(self._inner)
        ends = 2 if self.question.private else 0
        return sum(perm(devices, n) * comb(units - 1, n + ends - 1) for n in range(1, devices + 1))

    def every_placement(self) -> Iterator[DevicePlacement]:
        """All straight pipelines over all subsets and orders of the devices."""
        units, holder = self.cost.unit_count, (self.cost.holder,) if self.question.private else ()
        # Each stage has a unit at least: where more devices are in a row, none is left for some.
        most = min(len(self._inner), units - 2 * len(holder))
        for n in range(1, most + 1):
            for middle in permutations(self._inner, n):
                devices = (*holder, *middle, *holder)
                for cuts in combinations(range(1, units), len(devices) - 1):
                    yield (0, *cuts, units), devices

    def _search(self) -> None:
        values = []
        for split in self.question.splits:
            few = self._fastest(MAX_SCREENED_DEVICES)
            partition = Partition(self.cost, split, question=self.question, cuts=self._cuts)
            found = [self._ordered(partition, order) for order in self._orders(few)[:2]]
            values.append((min(found), split))
        values.sort(key=lambda value: value[0])
        for _, split in values[:PROMISING]:
            self._search_split(split)

    def _search_split(self, split: BatchSplit) -> None:
        inner = self._inner
        for duplex in (True, False):
            partition = Partition(
                self.cost, split, duplex=duplex, question=self.question, cuts=self._cuts
            )
            if len(inner) > MAX_SUBSET_DEVICES:
                for order in self._orders(self._fastest(MAX_ORDERED_DEVICES)):
                    self._ordered(partition, order)
            chosen = self._fastest(MAX_SUBSET_DEVICES)
            self._gather(partition, list(every_subset(partition, chosen, self._tail(partition))))

    def _fastest(self, most: int) -> tuple[int, ...]:
        """At most `most` devices, fastest first; all of them where that is no more."""
        if len(self._inner) <= most:
            return self._inner
        by_speed = sorted(self._inner, key=lambda device: whole_seconds(self.cost, device))
        return tuple(by_speed[:most])

    def _orders(self, devices: Sequence[int]) -> list[tuple[int, ...]]:
        return likely_orders(self.cost, devices)

    def _tail(self, partition: Partition) -> Suffix | None:
        return partition.last(self.cost.holder) if self.question.private else None

    def _ordered(self, partition: Partition, order: Sequence[int]) -> float:
        return self._gather(partition, list(in_order(partition, order, self._tail(partition))))

    def _gather(self, partition: Partition, suffixes: list[Suffix]) -> float:
        """Put the best whole pipelines into the pool; the value of the best one."""
        if self.question.private:
            suffixes = _with_holder_in_front(partition, suffixes, self.cost.holder)
        possible = [suffix for suffix in suffixes if isfinite(suffix.value[0])]
        if self.question.required:
            needed = self.question.required
            possible = [s for s in possible if needed <= frozenset(s.placement()[1])]
        kept = nsmallest(KEPT, possible, key=lambda suffix: float(suffix.value[0]))
        self._collect(partition.split, map(partition.placement, kept))
        return float(kept[0].value[0]) if kept else float("inf")

    def _collect(self, split: BatchSplit, placements: Iterable[DevicePlacement]) -> None:
        for borders, devices in placements:
            drafts = filter(self.question.allow, self.judge.drafted(split, borders, devices))
            self.pools.setdefault(split, {}).update(dict.fromkeys(drafts))


def _with_holder_in_front(
    partition: Partition, suffixes: Sequence[Suffix], holder: int
) -> list[Suffix]:
    """The holder before the best suffixes, by the suffixes' heads."""
    by_head: dict[int, list[Suffix]] = {}
    for suffix in suffixes:
        by_head.setdefault(suffix.device, []).append(suffix)
    return [partition.extend(holder, group, twice=True) for group in by_head.values()]
