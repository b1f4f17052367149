"""Judging drafts: the bound first, the simulation where the bound leaves hope, each once.

The budget counts simulated tasks (a bound in a climb counts as a round of one micro-batch), not
seconds, so the same question has the same answer on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, draft_groups, draft_pipeline, usual_depths
from p2ptrain.plan.simulation.bound import DraftBounds
from p2ptrain.plan.simulation.simulate import predicted_seconds
from p2ptrain.plan.simulation.steady import simulated_tasks
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.request import PlanMode

LONG_ROUND_TASKS = 1200
"""Rounds of more tasks are extrapolated while drafts are compared."""

WORTH = 0.999
"""A deeper warm-up costs memory: it must gain a thousandth."""

ROUNDING = 1e-9
"""Rounds that differ by so small a part take equally long: times are sums in different orders."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A draft and the seconds of its round, exact unless said otherwise."""

    seconds: float
    draft: Draft

    def beats(self, other: Judged) -> bool:
        """Whether its round is faster by more than rounding."""
        return self.seconds < other.seconds * (1 - ROUNDING)


class Judge:
    """Bounds and simulates drafts of one cost model within a budget of simulated tasks."""

    def __init__(self, cost: CostModel, budget_tasks: int) -> None:
        self.cost = cost
        self.budget_tasks = budget_tasks
        self._bound = DraftBounds(cost)
        self._bounds: dict[Draft, float] = {}
        self._seconds: dict[Draft, float] = {}
        self._exact: dict[Draft, float] = {}

    @property
    def exhausted(self) -> bool:
        """Whether the budget is used up; drafts can still be judged, but search should end."""
        return self.budget_tasks <= 0

    def bound(self, draft: Draft) -> float:
        """Seconds that its round takes at least."""
        seconds = self._bounds.get(draft)
        if seconds is None:
            seconds = self._bounds[draft] = self._bound.of(draft)
        return seconds

    def seconds(self, draft: Draft) -> float:
        """Seconds of its round; of a long round extrapolated from two short ones."""
        if draft not in self._seconds:
            self._seconds[draft] = self._screened(draft)
        return self._seconds[draft]

    def exact(self, draft: Draft) -> Judged:
        """The whole round simulated."""
        if draft not in self._exact:
            self._exact[draft] = self._simulated(draft)
        return Judged(self._exact[draft], draft)

    def drafted(
        self, split: BatchSplit, borders: Sequence[int], devices: Sequence[int]
    ) -> tuple[Draft, ...]:
        """The placement with usual depths; if deeper ones may be faster, with such depths too.

        Of the deeper ones the first whose bound is about as good as the deepest's: more would only
        cost memory. Empty where memory does not allow the placement.
        """
        usual = draft_pipeline(self.cost, split, borders, devices)
        return () if usual is None else (usual, *self.deepened(usual))

    def deepened(self, usual: Draft) -> tuple[Draft, ...]:
        """A draft of usual depths with deeper ones, if those may be faster by its bound.

        The first whose bound is about as good as the deepest's: more would only cost memory.
        """
        depths = (usual.split.micro_batches,) * len(usual.groups)
        deepest = draft_groups(self.cost, usual.split, usual.borders, usual.groups, depths)
        if deepest is None or self.bound(usual) * WORTH <= self.bound(deepest):
            return ()
        for draft in self.depths(usual):
            if self.bound(draft) * WORTH <= self.bound(deepest):
                return (draft,)
        return (deepest,)

    def depths(self, draft: Draft) -> Iterator[Draft]:
        """The same placement with other warm-up depths, shallow ones first."""
        stages, count = len(draft.groups), draft.split.micro_batches
        usual = usual_depths(draft.groups, count)
        wanted = [tuple(stages - p for p in range(stages)), usual]
        wanted += [tuple(depth + more for depth in usual) for more in (1, 2, 4)]
        wanted += [tuple(depth * times for depth in usual) for times in (2, 4)]
        wanted.append((count,) * stages)
        for depths in wanted:
            cut = [min(depth, count) for depth in depths]
            other = draft_groups(self.cost, draft.split, draft.borders, draft.groups, cut)
            if other is not None and other.warmup != draft.warmup:
                yield other

    def best_of(
        self, drafts: Iterable[Draft], best: Judged | None = None, reserve_tasks: int = 0
    ) -> Judged | None:
        """The fastest of `drafts`, of equally fast ones the first, or `best` where none is faster.

        Drafts are simulated in order of their bounds until the next bound shows that no other can
        win, or the budget falls to `reserve_tasks` (the first is always simulated).
        """
        for draft in sorted(drafts, key=lambda draft: float(f"{self.bound(draft):.9e}")):
            spent = self.budget_tasks <= reserve_tasks
            if best is not None and (self.bound(draft) >= best.seconds or spent):
                break
            judged = Judged(self.seconds(draft), draft)
            if best is None or judged.beats(best):
                best = judged
        return best

    def _screened(self, draft: Draft) -> float:
        stages, split = len(draft.groups), draft.split
        if self.cost.mode is PlanMode.ASYNC or any(group.deals for group in draft.groups):
            return self.exact(draft).seconds  # its shares are of a whole round
        short = draft.warmup[0] + 4 * stages + 4
        longer = short + 2 * stages + 4
        if 2 * stages * split.micro_batches <= max(LONG_ROUND_TASKS, 4 * stages * longer):
            return self.exact(draft).seconds
        first, second = (
            self._simulated(
                replace(draft, split=BatchSplit(count * split.micro_batch, split.micro_batch))
            )
            for count in (short, longer)
        )
        each = (second - first) / (longer - short)
        return second + each * (split.batch_size / split.micro_batch - longer)

    def _simulated(self, draft: Draft) -> float:
        if self.cost.mode is PlanMode.SYNC:
            kinds = 3 if draft.held else 2
            lanes = sum(1 if group.deals else len(group.devices) for group in draft.groups)
            self.budget_tasks -= kinds * lanes * draft.split.micro_batches
        else:
            self.budget_tasks -= simulated_tasks(draft)
        return predicted_seconds(self.cost, draft)
