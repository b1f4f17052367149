"""The best pipeline of groups: every structure estimated, the best simulated, those improved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from p2ptrain.plan.climb import climb_fine
from p2ptrain.plan.divider import Divider
from p2ptrain.plan.draft import Draft, Group, draft_groups
from p2ptrain.plan.estimate import Estimator
from p2ptrain.plan.group_tables import Kind, group_tables
from p2ptrain.plan.judge import Judge, Judged
from p2ptrain.plan.rules import Rules
from p2ptrain.plan.split import BatchSplit
from p2ptrain.plan.structures import (
    count_structures,
    every_kind,
    every_structure,
    pinned,
    sequences,
)

MOST_STRUCTURES = 20_000
"""Structures of one batch split that are all estimated: two microseconds each."""
KEPT = 60
"""Structures of one batch split that are drafted."""
CLIMBED = 6
"""Structures that are improved by small changes."""
SIMULATED_SHARE = 0.5
"""Part of the budget for structures before any is improved."""
HOPE = 1.1
"""An estimate so far above the best round is not simulated: few are that pessimistic."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A structure worth drafting; `estimate` in seconds."""

    estimate: float
    split: BatchSplit
    borders: tuple[int, ...]
    kinds: tuple[Kind, ...]


@dataclass(frozen=True, slots=True)
class GroupSearch:
    """One search.

    Attributes:
        devices: those that may be used.
        least_with: by device, the best candidate by estimate that uses it and others.
    """

    judge: Judge
    devices: tuple[int, ...]
    splits: Sequence[BatchSplit]
    rules: Rules
    divider: Divider
    least_with: dict[int, Candidate] = field(default_factory=dict)

    def run(self, best: Judged | None) -> Judged | None:
        """The fastest pipeline found, or `best` where none is faster."""
        candidates = sorted(self._candidates(), key=lambda c: c.estimate)
        budget = self.judge.budget_tasks
        simulated = self._simulate(candidates, best, int(budget * (1 - SIMULATED_SHARE)))
        if best is not None:
            simulated.append(best)
        starts = _unlike(sorted(simulated, key=lambda judged: judged.seconds))[:CLIMBED]
        left = self.judge.budget_tasks
        for i, start in enumerate(starts):
            reserve = int(left * (1 - (i + 1) / len(starts)))
            climbed = climb_fine(self.judge, self.rules, start, reserve)
            if best is None or climbed.seconds < best.seconds:
                best = climbed
        return best

    def _candidates(self) -> Iterator[Candidate]:
        for split in self.splits:
            yield from self._of_split(split)

    def _of_split(self, split: BatchSplit) -> list[Candidate]:
        """The best structures by estimate, and the best one with every device."""
        cost, cuts = self.judge.cost, tuple(range(self.judge.cost.unit_count + 1))
        kinds = every_kind(self.devices)
        found = sequences(kinds, min(len(self.devices), len(cuts) - 1))
        if self.rules.private:
            found = pinned(found, self.devices.index(self.rules.holder))
        estimator = Estimator(group_tables(cost, split, kinds, cuts, self.rules))
        candidates = []
        for kinds_of, cuts_of in every_structure(found, len(cuts)):
            seconds = estimator.seconds(kinds_of, cuts_of)
            for i in np.argsort(seconds, kind="stable")[:KEPT]:
                if isfinite(seconds[i]):
                    candidates.append(
                        Candidate(
                            float(seconds[i]),
                            split,
                            tuple(cuts[c] for c in cuts_of[i]),
                            tuple(kinds[k] for k in kinds_of[i]),
                        )
                    )
        return sorted(candidates, key=lambda c: c.estimate)[:KEPT]

    def drafts(self, candidate: Candidate) -> Iterator[Draft]:
        """The candidate with balanced shares; with usual depths, and deeper where worth it."""
        groups: list[Group] = []
        for kind, units in zip(
            candidate.kinds, zip(candidate.borders, candidate.borders[1:], strict=False), strict=True
        ):
            divide = self.divider.micro_batches if kind.deals else self.divider.samples
            group = divide(candidate.split, kind.devices, units)
            if group is None:
                return
            groups.append(group)
        draft = draft_groups(self.judge.cost, candidate.split, candidate.borders, groups)
        if draft is not None and self.rules.allow(draft):
            yield draft
            yield from self.judge.deepened(draft)

    def _simulate(
        self, candidates: Sequence[Candidate], best: Judged | None, reserve: int
    ) -> list[Judged]:
        simulated: list[Judged] = []
        fastest = np.inf if best is None else best.seconds
        for candidate in candidates:
            if self.judge.budget_tasks <= reserve or candidate.estimate > fastest * HOPE:
                break
            for draft in self.drafts(candidate):
                if self.judge.bound(draft) < fastest:
                    seconds = self.judge.seconds(draft)
                    simulated.append(Judged(seconds, draft))
                    fastest = min(fastest, seconds)
        return simulated


def _unlike(judged: Sequence[Judged]) -> list[Judged]:
    """The first of each set of groups and borders."""
    seen = set()
    kept = []
    for one in judged:
        draft = one.draft
        key = draft.split, draft.borders, tuple((g.devices, g.deals) for g in draft.groups)
        if key not in seen:
            seen.add(key)
            kept.append(one)
    return kept
