"""The best pipeline of groups: every structure estimated, the best simulated, those improved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

import numpy as np

from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.draft import Draft, usual_depths
from p2ptrain.plan.search.climb import climb_combined, climb_fine, climb_sizes, relieved, try_depths
from p2ptrain.plan.search.drafting import Drafter
from p2ptrain.plan.search.estimate import Estimator
from p2ptrain.plan.search.fine import deeper
from p2ptrain.plan.search.group_tables import Kind, Wholes, group_tables
from p2ptrain.plan.search.structures import (
    count_structures,
    every_kind,
    every_structure,
    pinned,
    sequences,
)
from p2ptrain.plan.shared.judge import Judge, Judged
from p2ptrain.plan.shared.micro_batches import neighbouring_splits
from p2ptrain.plan.shared.rules import Rules
from p2ptrain.plan.split import BatchSplit

MOST_STRUCTURES = 60_000
"""Structures of one batch split that are all estimated: two microseconds each."""
MOST_ESTIMATES = 160_000
"""Structures of all batch splits together."""
MOST_WIDENED = 8_000
"""Structures of one batch split with which neighbouring sizes are looked at too."""
MOST_DEVICES = 5
"""Beyond, even the sequences of groups are too many to list."""
KEPT = 150
"""Structures of one batch split that are candidates."""
RELIEVED = 1.5
"""An estimate so little above the best round is no reason not to move shares first."""
DRAFTED = 300
"""Structures of all splits together that are drafted and bounded."""
CLIMBED = 40
"""Structures that are improved by small changes, as far as the budget goes."""
ENSURED = 12
"""Of these, the fastest, those among which the budget is divided."""
AGAIN = 6
"""The fastest of these, which are climbed again where the budget ended a climb."""
CLIMBING_SHARE = 0.45
"""Part of what is left that each of both climbs may spend; then depths are tried."""
DEEPENED = 2
"""Improved structures for which many depths are tried."""
COMBINED = 6
"""Improved structures for which two changes at once are tried."""
RESIZED = 4
"""Improved structures for which other micro-batch sizes are tried."""
WIDENED = 2
"""Micro-batch sizes whose neighbouring sizes are looked at too."""
ALWAYS = 8
"""The best by estimate are starts whatever the bound: it may be of members in a bad order."""
WAITING = 1.02
"""A round so much above its bound may gain by deeper warm-ups."""
SIMULATED_SHARE = 0.5
"""Part of the budget for structures before any is improved."""
HOPE = 1.5
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
        least_piece: as in `Question`.
        least_with: by device, the best candidates by estimate that use it and others.
    """

    judge: Judge
    devices: tuple[int, ...]
    splits: Sequence[BatchSplit]
    rules: Rules
    drafter: Drafter
    least_piece: int | None = None
    least_with: dict[int, list[Candidate]] = field(default_factory=dict)

    def run(self, best: Judged | None) -> Judged | None:
        """The fastest pipeline found, or `best` where none is faster."""
        candidates = sorted(self._candidates(), key=lambda c: c.estimate)
        budget = self.judge.budget_tasks
        simulated = self._simulate(candidates, best, int(budget * (1 - SIMULATED_SHARE)))
        if best is not None:
            simulated.append(best)
        starts = unlike(simulated, by_depth=True)[:CLIMBED]
        ends = self._improved(starts)
        if best is not None:
            ends.append(best)
        return min(ends, key=lambda judged: judged.seconds, default=None)

    def _improved(self, starts: Sequence[Judged]) -> list[Judged]:
        """Every start climbed, the best again, and those after a look at many depths and more."""
        judge = self.judge
        ends = self._climbed(self._climbed(starts, ENSURED)[:AGAIN], AGAIN)
        for i, end in enumerate(ends[:DEEPENED]):
            deepened = try_depths(judge, end, reserve_tasks=0)
            if deepened is not end:
                ends[i] = climb_fine(judge, self.drafter, deepened, reserve_tasks=0)
        for i, end in enumerate(ends[:COMBINED]):
            ends[i] = climb_combined(judge, self.drafter, end, reserve_tasks=0)
        ends.sort(key=lambda judged: judged.seconds)
        if self.least_piece is not None:
            ends = [
                climb_sizes(judge, self.drafter, end, self.least_piece) for end in ends[:RESIZED]
            ]
        return ends

    def _climbed(self, starts: Sequence[Judged], ensured: int) -> list[Judged]:
        """Every start climbed, fastest first; the budget is divided among the first `ensured`."""
        ends, left = [], self.judge.budget_tasks
        for i, start in enumerate(starts):
            part = min(1, (i + 1) / min(ensured, len(starts)))
            reserve = int(left * (1 - CLIMBING_SHARE * part))
            ends.append(climb_fine(self.judge, self.drafter, start, reserve))
        return unlike(ends, by_depth=False)

    def _candidates(self) -> list[Candidate]:
        """Of the sizes given, and where others may be chosen, of those next to the best two."""
        by_split = {split: self._of_split(split) for split in self.splits}
        count = _count(self.judge.cost, self.devices, self.rules)
        if self.least_piece is not None and count <= MOST_WIDENED:
            least = {split: found[0].estimate for split, found in by_split.items() if found}
            for best in sorted(least, key=lambda split: least[split])[:WIDENED]:
                for split in neighbouring_splits(best, self.least_piece):
                    if split not in by_split:
                        by_split[split] = self._of_split(split)
        return [candidate for found in by_split.values() for candidate in found]

    def _of_split(self, split: BatchSplit) -> list[Candidate]:
        """The best structures by estimate; remembers the best one with every device."""
        found = Estimated(self.judge.cost, split, self.devices, self.rules)
        for device in self.devices:
            self.least_with.setdefault(device, []).extend(found.best_with(device))
        return found.best(KEPT)

    def drafts_with(self, device: int, best: Judged) -> list[Draft]:
        """Drafts of the best candidate that uses `device`, whatever is `best`."""
        candidates = sorted(self.least_with.get(device, ()), key=lambda c: c.estimate)
        drafts = (list(self.drafts(candidate)) for candidate in candidates)
        return next((found for found in drafts if found), [])

    def drafts(self, candidate: Candidate) -> Iterator[Draft]:
        """The candidate's drafts."""
        return self.drafter.drafts(candidate.split, candidate.borders, candidate.kinds)

    def _simulate(
        self, candidates: Sequence[Candidate], best: Judged | None, reserve: int
    ) -> list[Judged]:
        simulated: list[Judged] = []
        fastest = np.inf if best is None else best.seconds
        for rank, candidate in enumerate(candidates[:DRAFTED]):
            if self.judge.budget_tasks <= reserve or candidate.estimate > fastest * HOPE:
                break
            for start in self.drafts(candidate):
                draft = start
                if candidate.estimate < fastest * RELIEVED:
                    draft = relieved(self.judge, start, self.rules, fastest)
                if rank < ALWAYS or self.judge.bound(draft) < fastest:
                    simulated += self._at_depths(draft)
                    fastest = min(fastest, *(judged.seconds for judged in simulated))
        return simulated

    def _at_depths(self, draft: Draft) -> list[Judged]:
        """Simulated, and where it waits more than its bound says, deeper too."""
        judged = Judged(self.judge.seconds(draft), draft)
        if judged.seconds < WAITING * self.judge.bound(draft):
            return [judged]
        return [judged, *(Judged(self.judge.seconds(d), d) for d in deeper(self.judge.cost, draft))]


class Estimated:
    """All structures of one batch split, estimated; with `cuts` those with no other borders."""

    def __init__(
        self,
        cost: CostModel,
        split: BatchSplit,
        devices: tuple[int, ...],
        rules: Rules,
        cuts: tuple[int, ...] | None = None,
    ) -> None:
        self.split, self.cuts = split, cuts or tuple(range(cost.unit_count + 1))
        self.kinds = permitted_kinds(devices, rules)
        found = structure_sequences(cost, devices, rules, len(self.cuts) - 1)
        estimator = Estimator(group_tables(cost, split, self.kinds, self.cuts, rules))
        self.arrays = [
            (kinds, cuts, estimator.seconds(kinds, cuts))
            for kinds, cuts in every_structure(found, len(self.cuts))
        ]

    def best(self, most: int) -> list[Candidate]:
        """At most `most` possible structures, fastest first."""
        found = [
            self._candidate(kinds[i], cuts[i], float(seconds[i]))
            for kinds, cuts, seconds in self.arrays
            for i in np.argsort(seconds, kind="stable")[:most]
            if isfinite(seconds[i])
        ]
        return sorted(found, key=lambda candidate: candidate.estimate)[:most]

    def best_with(self, device: int) -> list[Candidate]:
        """By number of stages, the best possible structure of `device` and others."""
        uses = np.array([device in kind.devices for kind in self.kinds])
        alone = np.array([kind.devices == (device,) for kind in self.kinds])
        best = []
        for kinds, cuts, seconds in self.arrays:
            chosen = uses[kinds].any(axis=1) & ~alone[kinds].all(axis=1)
            limited = np.where(chosen, seconds, np.inf)
            i = int(np.argmin(limited))
            if isfinite(limited[i]):
                best.append(self._candidate(kinds[i], cuts[i], float(limited[i])))
        return best

    def _candidate(self, kinds: Wholes, cuts: Wholes, estimate: float) -> Candidate:
        borders = tuple(self.cuts[cut] for cut in cuts)
        return Candidate(estimate, self.split, borders, tuple(self.kinds[k] for k in kinds))


def is_tiny(cost: CostModel, devices: tuple[int, ...], rules: Rules, splits: int) -> bool:
    """Whether all structures can be estimated for that many batch splits."""
    count = _count(cost, devices, rules)
    return count <= MOST_STRUCTURES and count * splits <= MOST_ESTIMATES


def _count(cost: CostModel, devices: tuple[int, ...], rules: Rules) -> float:
    """Structures of one batch split; inf where they are too many to count."""
    if len(devices) > MOST_DEVICES:
        return inf
    found = structure_sequences(cost, devices, rules, cost.unit_count)
    return count_structures(found, cost.unit_count + 1)


def permitted_kinds(devices: tuple[int, ...], rules: Rules) -> tuple[Kind, ...]:
    """Every device alone, and the groups that may be."""
    return tuple(
        kind
        for kind in every_kind(devices)
        if len(kind.devices) == 1 or rules.permit(deals=kind.deals)
    )


def structure_sequences(
    cost: CostModel, devices: tuple[int, ...], rules: Rules, most_stages: int
) -> dict[int, list[tuple[int, ...]]]:
    """By number of stages, the sequences of kinds that `rules` allow."""
    kinds = permitted_kinds(devices, rules)
    found = sequences(kinds, min(len(devices), most_stages))
    if rules.private:
        found = pinned(found, kinds, rules.holder)
    if not rules.required:
        return found
    return {
        length: [
            sequence
            for sequence in listed
            if rules.required <= {device for k in sequence for device in kinds[k].devices}
        ]
        for length, listed in found.items()
    }


def unlike(judged: Iterable[Judged], *, by_depth: bool) -> list[Judged]:
    """The fastest of each set of groups and borders; `by_depth` also the fastest that is deeper.

    Deeper than usual, that is: climbs from the one and from the other may end differently.
    """
    kept: dict[tuple[object, ...], Judged] = {}
    for one in sorted(judged, key=lambda one: one.seconds):
        draft = one.draft
        usual = usual_depths(draft.groups, draft.split.micro_batches)
        groups = tuple((frozenset(group.devices), group.deals) for group in draft.groups)
        deep = by_depth and sum(draft.warmup) > sum(usual)
        kept.setdefault((draft.split, draft.borders, groups, deep), one)
    return list(kept.values())
