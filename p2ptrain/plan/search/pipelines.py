"""The search for the fastest pipeline.

Starts are every straight pipeline where these are few, else the best cuts of likely orders of
stages (`orders.py`); changes of structure, shares and depths lead on from the fastest. Of many
devices the starts alone are looked for: annealing changes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from math import inf, isfinite

from p2ptrain.plan.cost.draft import Draft
from p2ptrain.plan.problem.candidates import even_window
from p2ptrain.plan.problem.judge import Judge, Judged
from p2ptrain.plan.problem.order_cuts import Order
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.search.climb import climb_coarse
from p2ptrain.plan.search.orders import OrderSearch, by_length, count_placements, every_placement
from p2ptrain.plan.search.shares import Drafter
from p2ptrain.plan.search.structure_moves import taking_in
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.request import PlanMode

MIN_TASKS, PAIR_TASKS, MAX_TASKS = 100_000, 100, 700_000
"""The budget grows with the pairs of devices, up to a limit."""

STARTS_SHARE = 0.5
"""Part of the budget for starts; the rest is for changes."""

MANY_UNITS, MANY_UNITS_TASKS = 64, 25_000
"""Of models of more units the named planners take their time, and searching gets less."""

MAX_ENUMERATED = 300
"""Straight pipelines of one batch split that are enumerated rather than searched."""

PROMISING, PROMISING_OF_SMALL = 2, 3
"""Micro-batch sizes for which orders are searched."""

LOOKS, MOST_ELEMENTS = 16, 60_000_000
"""Orders whose neighbours are looked at, and how much that may cost (`look_around`)."""

LOOKS_OF_WIDE, MOST_OF_WIDE = 8, 20_000_000
"""The same of many devices."""

KEPT, KEPT_OF_EACH, KEPT_OF_LENGTH = 12, 1, 3
"""Orders of which drafts are made: the best, and so many of each number of devices or, of many
devices, of stages."""

CLIMBED = 6
"""Starts that are improved."""

MAX_SMALL = 100
"""Devices times units up to which a search is small."""

FEW = 4
"""Changes looked at for each device left out of many, or once the budget is used up."""


@dataclass(frozen=True, slots=True)
class PipelineSearch:
    """One search; `pool` keeps the drafts that it began with."""

    question: Question
    drafter: Drafter
    pool: dict[Draft, None] = field(default_factory=dict)

    @classmethod
    def of(cls, question: Question) -> PipelineSearch:
        """Of that question, with its own judge."""
        return cls(question, Drafter(question))

    @property
    def judge(self) -> Judge:
        """The question's judge."""
        return self.question.judge

    def run(self, best: Judged | None) -> Judged | None:
        """The fastest pipeline found, or `best` where none is faster."""
        self.judge.budget_tasks = self._budget_tasks()
        starts = self._starts(best)
        left = self.judge.budget_tasks
        if self.question.is_wide:  # annealing judges fewer changes than a climb
            self.judge.budget_tasks = min(left, int(MIN_TASKS * self.question.effort))
            return starts[0] if starts else None
        climbed_starts = max(1, round(CLIMBED * self.question.effort))
        for i, start in enumerate(starts[:climbed_starts]):
            reserve = int(left * (1 - (i + 1) / climbed_starts))
            climbed = climb_coarse(self.judge, self.drafter, start, self.question.devices, reserve)
            if best is None or climbed.seconds < best.seconds:
                best = climbed
        return best

    def _budget_tasks(self) -> int:
        least = MIN_TASKS if self.judge.cost.unit_count <= MANY_UNITS else MANY_UNITS_TASKS
        tasks = min(least + PAIR_TASKS * len(self.question.devices) ** 2, MAX_TASKS)
        return int(tasks * self.question.effort)

    @property
    def _size(self) -> int:
        """What drafting and simulating a change grows with."""
        return len(self.question.devices) * self.judge.cost.unit_count

    def drafts_with(self, device: int, best: Judged) -> list[Draft]:
        """Drafts in which `device` has a part: the one of least bound is worth judging."""
        known = [d for d in self.pool if device in d.devices and len(d.devices) > 1]
        drafts = [*known, *self._changed_to_use(device, best.draft)]
        shared = [draft for draft in drafts if len(draft.devices) > 1] or drafts
        return [min(shared, key=self.judge.bound)] if shared else []

    def _changed_to_use(self, device: int, draft: Draft) -> Iterator[Draft]:
        changes = taking_in(draft, device, self.question)
        few = self.judge.exhausted or self.question.is_wide
        for borders, stages in islice(changes, FEW if few else None):
            yield from self.drafter.drafts(draft.split, borders, stages)

    def _starts(self, best: Judged | None) -> list[Judged]:
        """Different drafts, fastest first."""
        few = count_placements(self.question) <= MAX_ENUMERATED
        drafts = {s: self._enumerated(s) if few else [] for s in self.question.splits}
        for search in self._promising():
            drafts[search.split] += self._ordered(search)
        found = [] if best is None else [best]
        budget = self.judge.budget_tasks
        for i, of_split in enumerate(drafts.values(), 1):
            self.pool.update(dict.fromkeys(of_split))
            reserve = int(budget * (1 - STARTS_SHARE * i / len(drafts)))
            found += self._simulated(of_split, reserve)
        return _unlike(found)

    def _enumerated(self, split: BatchSplit) -> list[Draft]:
        drafts = (self.judge.drafted(split, *place) for place in every_placement(self.question))
        return [draft for several in drafts for draft in several if self.question.allow(draft)]

    def _promising(self) -> list[OrderSearch]:
        """Of the micro-batch sizes whose best start has the least value."""
        searches = [OrderSearch.of(self.question, split) for split in self.question.splits]
        most = PROMISING if self._size > MAX_SMALL else PROMISING_OF_SMALL
        if len(searches) <= most:
            return searches
        for search in searches:
            search.add(search.starts(few=True))
        searches.sort(key=self._first_seconds if self.question.is_wide else OrderSearch.least_value)
        return searches[:most]

    def _first_seconds(self, search: OrderSearch) -> float:
        """Of a round of the best order so far."""
        drafts = list(self._drafts(search, search.ranked()[:1]))
        return self.judge.seconds(min(drafts, key=self.judge.bound)) if drafts else inf

    def _ordered(self, search: OrderSearch) -> Iterator[Draft]:
        """Drafts of the best orders, and of the best straight ones."""
        search.add(search.starts())
        searches = [search, search.straight()] if self.question.groups else [search]
        for one in searches:
            if self.question.is_wide:
                yield from self._drafts(search, _various(one))
                one.look_around(LOOKS_OF_WIDE, int(MOST_OF_WIDE * self.question.effort))
            else:
                one.look_around(LOOKS, int(MOST_ELEMENTS * self.question.effort))
            yield from self._drafts(search, _various(one))

    def _drafts(self, search: OrderSearch, orders: Sequence[Order]) -> Iterator[Draft]:
        """With their best cuts."""
        for same in by_length(orders):
            _, borders = search.exactly(same, search.places)
            for order, rows in zip(same, borders, strict=True):
                split = self._window(search.split, order)
                for row in dict.fromkeys(map(tuple, rows)):
                    if all(first < end for first, end in pairwise(row)):
                        yield from self.drafter.drafts(split, row, order)

    def _window(self, split: BatchSplit, order: Order) -> BatchSplit:
        if self.judge.cost.mode is PlanMode.SYNC:
            return split
        return even_window(split, [len(part.devices) for part in order if part.deals] or [1])

    def _simulated(self, drafts: Iterable[Draft], reserve_tasks: int) -> list[Judged]:
        """Those of least bound, as far as the budget goes, and one at least."""
        found: list[Judged] = []
        for draft in sorted(drafts, key=self.judge.bound):
            if found and self.judge.budget_tasks <= reserve_tasks:
                break
            found.append(Judged(self.judge.seconds(draft), draft))
        return found


def _various(search: OrderSearch) -> list[Order]:
    """The best orders, and the best ones of each number of devices, or of stages."""
    ranked = [order for order in search.ranked() if isfinite(search.values[order])]
    wide = search.question.is_wide
    chosen, counts = dict.fromkeys(ranked[:KEPT]), dict[int, int]()
    for order in ranked:
        size = len(order) if wide else len({device for part in order for device in part.devices})
        counts[size] = counts.get(size, 0) + 1
        if counts[size] <= (KEPT_OF_LENGTH if wide else KEPT_OF_EACH):
            chosen[order] = None
    return list(chosen)


def _unlike(starts: Sequence[Judged]) -> list[Judged]:
    """The fastest with and without groups of every micro-batch size, then of every structure."""
    first: dict[tuple[BatchSplit, bool], Judged] = {}
    others: dict[tuple[BatchSplit, tuple[frozenset[int], ...]], Judged] = {}
    for start in sorted(starts, key=lambda judged: judged.seconds):
        split, groups = start.draft.split, start.draft.groups
        first.setdefault((split, start.draft.is_straight), start)
        others.setdefault((split, tuple(frozenset(group.devices) for group in groups)), start)
    kept = list(first.values())
    return [*kept, *(start for start in others.values() if start not in kept)]
