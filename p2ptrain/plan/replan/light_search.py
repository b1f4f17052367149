"""The search of the light re-plan: near orders, their best cuts, and cuts beside those."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, UnplacedGroup, peak_bytes
from p2ptrain.plan.problem.candidates import useful_cuts
from p2ptrain.plan.problem.judge import Judge, Judged
from p2ptrain.plan.problem.order_cuts import Floats, Order, OrderCuts
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.replan.migration import Pause
from p2ptrain.plan.replan.replica_holders import Replicas
from p2ptrain.plan.search.orders import OrderSearch, by_length
from p2ptrain.plan.search.shares import Drafter
from p2ptrain.plan.simulation.simulate import draft_of
from p2ptrain.plan.types.allocation import Allocation
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.request import PlanRequest

TOLERANCE = 0.01
"""A plan this much slower than the fastest found is taken if it moves fewer bytes."""

MAX_PLACES = 22
"""Cut places while orders are compared."""

MAX_FINE_PLACES = 44
"""Cut places of the best orders; what lies between is reached by moving borders."""

WORTH_DEPTHS = 1.02
"""A round this little above its bound is not tried with other depths."""


@dataclass(frozen=True, slots=True)
class ReplanEffort:
    """How much is looked at: about 20 ms at the median of 8 devices and 64 units.

    Attributes:
        search_tasks: simulated for the fastest draft (a round of 8 stages and 32 micro-batches has
            512).
        depth_tasks: for other depths of the fastest where stages deal whole micro-batches.
        frugal_tasks: for drafts that move fewer bytes.
        most_elements: of the dynamic programmes over orders: orders x stages x places^2.
        exact_elements: of those that cut the best orders anywhere.
        finalists: orders of which drafts are made.
        looks: orders whose neighbours are looked at.
    """

    search_tasks: int
    depth_tasks: int
    frugal_tasks: int
    most_elements: int
    exact_elements: int
    finalists: int
    looks: int = 4


STRAIGHT = ReplanEffort(1500, 1500, 600, 1_200_000, 250_000, 6, looks=6)

GROUPED = ReplanEffort(1200, 700, 600, 1_500_000, 200_000, 4, looks=8)
"""Groups cost more to bound and to simulate."""

THOROUGH = ReplanEffort(20_000, 4000, 2000, 3_000_000, 1_000_000, 20, looks=8)
"""Two to four times as long, where there is no hurry: a join or drift."""


class _Missing:
    """Bytes that each device would have to fetch, by units."""

    def __init__(self, cost: CostModel, held: Replicas) -> None:
        sizes = [state.version_bytes for state in cost.unit_states]
        self._sums: list[Floats] = []
        for device in cost.devices:
            lacks = [
                0 if device.name in held.holders_of(unit) else size
                for unit, size in enumerate(sizes)
            ]
            self._sums.append(np.concatenate(([0], np.cumsum(lacks))))

    def of(self, draft: Draft) -> int:
        """Bytes that must travel for `draft`."""
        total = 0
        for (first, end), group in zip(draft.units, draft.groups, strict=True):
            total += sum(int(self._sums[d][end] - self._sums[d][first]) for d in group.devices)
        return total

    def by_cuts(self, part: UnplacedGroup) -> Floats:
        """[L+1, L+1] bytes that a stage of those devices lacks of units [i, j)."""
        sums = sum((self._sums[device] for device in part.devices), start=np.zeros(1))
        return np.asarray(sums[None, :] - sums[:, None], dtype=np.float64)


class LightSearch:
    """One light re-plan. `evaluated` counts the drafts simulated."""

    def __init__(
        self,
        cost: CostModel,
        plan: Plan,
        request: PlanRequest,
        held: Replicas,
        effort: ReplanEffort | None = None,
        pause: Pause | None = None,
    ) -> None:
        """`pause`: training stands still until the bytes are there."""
        self.cost, self.split, self.private = cost, plan.split, request.private
        self._pause = pause
        self._effort = effort or (GROUPED if request.groups else STRAIGHT)
        self.judge = Judge(cost, self._effort.search_tasks)
        self.evaluated = 0
        names = {device.name for device in cost.devices}
        wanted = names if request.only is None else names & request.only
        self.allowed = tuple(sorted(cost.index(name) for name in wanted))
        self._required = frozenset(cost.index(name) for name in request.required & names)
        self._caps = {cost.index(n): cap for n, cap in request.caps.items() if n in names}
        self._missing = _Missing(cost, held)
        self._question = Question(
            *(self.judge, [self.split], self.allowed, self.private, self._required, self._caps),
            groups=request.groups,
            allocations=request.allocations,
        )
        self._drafter = Drafter(self._question)
        self._cuts = OrderCuts(cost, self.split, self._caps, private=self.private)
        self._base = self._without_the_gone(plan, names)
        old_borders = tuple(stage.units[1] for stage in plan.stages[:-1])
        self._places, self._fine_places = (
            [0, *useful_cuts(cost, most, old_borders, by_time=True), cost.unit_count]
            for most in (max(few, 2 * len(self._base)) - 1 for few in (MAX_PLACES, MAX_FINE_PLACES))
        )
        self._search = OrderSearch(self._question, self.split, self._cuts, self._places)
        unchanged = names >= plan.device_names
        self._old = draft_of(plan, cost) if unchanged else None

    def run(self) -> Judged | None:
        """The draft chosen; None where none was found that fits."""
        orders = self._orders()
        drafts = self._solved(orders)
        old = [self._old] if self._old is not None and self._is_allowed(self._old) else []
        fastest = self._fastest(drafts, self._simulated(old[0]) if old else None)
        if fastest is None:
            return None
        self.judge.budget_tasks = self._effort.depth_tasks
        fastest = self._fastest(self._other_depths(fastest), fastest) or fastest
        self.judge.budget_tasks = self._effort.frugal_tasks
        if self._pause is None:
            return self._cheapest(fastest, [*old, *drafts, *self._near(fastest.draft)])
        self.judge.budget_tasks = self._effort.search_tasks
        known = [*old, *drafts]
        for order in dict.fromkeys((*orders[:2], *([self._base] if self._base else []))):
            known += self._soon(order, fastest.seconds, self._pause)
        return self._pause.soonest(self.judge, fastest, known, self._near)

    def _soon(self, order: Order, fastest_seconds: float, pause: Pause) -> list[Draft]:
        """Its best cuts where what must be fetched counts as what slower rounds would lose."""
        cost, repay = self.cost, max(pause.repay_seconds, 1.0)
        seconds_per_byte = float((1 / cost.links.rates).mean())
        per_byte = seconds_per_byte * fastest_seconds / repay / self._cuts.rounds
        cuts = OrderCuts(
            *(cost, self.split, self._caps),
            private=self.private,
            more_seconds=lambda part: per_byte * self._missing.by_cuts(part),
        )
        _, rows = cuts.solve([order] * 2, self._fine_places, (True, False))
        return [
            draft
            for row in dict.fromkeys(map(tuple, rows.tolist()))
            for draft in self._drafted(order, row)
        ]

    def _near(self, draft: Draft) -> Iterator[Draft]:
        """The same stages, their borders a little elsewhere."""
        for borders in shifts(draft.borders):
            near = self._shifted(draft, borders)
            if near is not None:
                yield near

    def _without_the_gone(self, plan: Plan, names: set[str]) -> Order:
        """The old plan's stages with the devices that are left; stages without any are dropped."""
        parts = []
        for stage in plan.stages:
            devices = tuple(
                self.cost.index(device.name) for device in stage.devices if device.name in names
            )
            devices = tuple(device for device in devices if device in self.allowed)
            if devices:
                alone = len(devices) == 1
                parts.append(
                    UnplacedGroup(devices, Allocation.SAMPLES if alone else stage.allocation)
                )
        holder = UnplacedGroup((self.cost.holder,))
        if self.private and not (parts and parts[0] == parts[-1] == holder):
            return ()  # the old plan was not private
        if len(parts) == 2 and parts[0] == parts[1]:
            return (parts[0],)  # a private plan whose middle is gone
        return tuple(parts)

    # -- orders ----------------------------------------------------------------------------------

    def _orders(self) -> list[Order]:
        """The best orders near the old one by value, best first; the old one is among them."""
        search, effort = self._search, self._effort
        start = self._base or search.least_order()
        if not start:
            return []
        search.add([start])
        search.look_around(effort.looks, effort.most_elements)
        exact = len(start) * len(self._fine_places) ** 2 * len(search.weights)
        most = max(effort.finalists, effort.exact_elements // exact)
        return list(dict.fromkeys((*search.ranked()[:most], start)))

    # -- drafts ----------------------------------------------------------------------------------

    def _solved(self, orders: Sequence[Order]) -> list[Draft]:
        """The best orders' best cuts by value, in both views of a link."""
        found: list[tuple[float, int, Order, list[list[int]]]] = []
        for same in by_length(orders):
            values, borders = self._search.exactly(same, self._fine_places)
            for i, order in enumerate(same):
                found.append((float(values[i]), len(found), order, borders[i]))
        found.sort()
        drafts: dict[Draft, None] = {}
        for _, _, order, rows in found[: self._effort.finalists]:
            for row in dict.fromkeys(map(tuple, rows)):
                drafts.update(dict.fromkeys(self._drafted(order, row)))
        return list(drafts)

    def _drafted(self, order: Order, borders: Sequence[int]) -> list[Draft]:
        """With usual depths, and deeper ones where their bound is better; empty if not allowed."""
        if any(end <= first for first, end in pairwise(borders)):
            return []
        return list(self._drafter.drafts(self.split, borders, order))

    def _shifted(self, draft: Draft, borders: tuple[int, ...]) -> Draft | None:
        """The same devices with other borders and, where they share, other shares."""
        stages = [
            group if units == old else UnplacedGroup(group.devices, group.allocation)
            for group, units, old in zip(draft.groups, pairwise(borders), draft.units, strict=True)
        ]
        moved = self._drafter.drafted(
            *(self.split, borders, stages), [1] * len(stages), draft.warmup
        )
        return moved if moved is not None and self._is_allowed(moved) else None

    def _is_allowed(self, draft: Draft) -> bool:
        peaks = peak_bytes(self.cost, draft)
        if any(peak > self.cost.devices[d].memory_bytes for d, peak in peaks.items()):
            return False
        return set(draft.devices) <= set(self.allowed) and self._question.allow(draft)

    def _simulated(self, draft: Draft) -> Judged:
        self.evaluated += 1
        return self.judge.exact(draft)

    def _fastest(self, drafts: Iterable[Draft], best: Judged | None) -> Judged | None:
        """The fastest draft, least bounds first, while the budget lasts."""
        for draft in sorted(dict.fromkeys(drafts), key=self.judge.bound):
            hopeless = best is not None and self.judge.bound(draft) >= best.seconds
            if hopeless or (best is not None and self.judge.exhausted):
                break
            judged = self._simulated(draft)
            if best is None or judged.seconds < best.seconds:
                best = judged
        return best

    def _other_depths(self, best: Judged) -> list[Draft]:
        """Other depths, where a round takes longer than its bound."""
        draft = best.draft
        if self.judge.bound(draft) * WORTH_DEPTHS > best.seconds:
            return []
        return [other for other in self.judge.depths(draft) if self._is_allowed(other)]

    # -- bytes -----------------------------------------------------------------------------------

    def _cheapest(self, fastest: Judged, drafts: Iterable[Draft]) -> Judged:
        """Of the drafts within TOLERANCE of the fastest, the one that moves fewest bytes."""
        limit = fastest.seconds * (1 + TOLERANCE)
        sized = {draft: self._missing.of(draft) for draft in drafts}
        for draft in sorted(sized, key=lambda one: (sized[one], self.judge.bound(one))):
            if sized[draft] >= self._missing.of(fastest.draft) or self.judge.exhausted:
                break
            if self.judge.bound(draft) <= limit:
                judged = self._simulated(draft)
                if judged.seconds <= limit:
                    return judged
        return fastest


def shifts(borders: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One border moved by a unit or a few, or a unit from the first stage to the last or back."""
    last = len(borders) - 1
    runs = [(p, p + 1) for p in range(1, last)]
    if last > 2:
        runs.append((1, last))
    for first, end in runs:
        for shift in (-3, -1, 1, 3):
            moved = tuple(border + shift for border in borders[first:end])
            if borders[first - 1] < moved[0] and moved[-1] < borders[end]:
                yield (*borders[:first], *moved, *borders[end:])
