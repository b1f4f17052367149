from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from random import Random

import numpy as np
import pytest

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.planners import equal_shares
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.problem.order_cuts import Floats, range_sums
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice
from p2ptrain.plan.types.profile import Profile
from tests.support import planning_examples

SPLIT = BatchSplit(8, 2)
MANY = 300


def asked(profile: Profile, cluster: Cluster) -> Question:
    cost = CostModel(profile, cluster)
    return Question(Judge(cost, 0), (SPLIT,), tuple(range(len(cost.devices))), private=True)


def borders_of(question: Question) -> tuple[int, ...] | None:
    draft = equal_shares.equal_shares(question, SPLIT)
    return None if draft is None else draft.borders


def test_the_holders_ends_in_a_model_of_many_units_take_few_programmes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once one of all units for every place where the last stage may begin: hundreds of them."""
    sizes: list[int] = []

    def counted(tables: Sequence[Floats], units: int) -> equal_shares.Unevenness:
        sizes.append(units)
        return most_equal(tables, units)

    most_equal = equal_shares.most_even_cuts
    monkeypatch.setattr(equal_shares, "most_even_cuts", counted)
    question = asked(
        planning_examples.profile([(1.0, 1.0)] * MANY), planning_examples.cluster("a", "b", "c")
    )
    assert borders_of(question) is not None
    assert sum(size**2 for size in sizes) <= 2 * MANY**2


def test_in_a_model_of_many_units_the_shares_are_still_equal() -> None:
    """A third of 300 units each, wherever the last stage begins."""
    question = asked(
        planning_examples.profile([(1.0, 1.0)] * MANY), planning_examples.cluster("a", "b", "c")
    )
    borders = borders_of(question)
    assert borders is not None
    first, second, third, last = (end - start for start, end in pairwise(borders))
    assert (first + last, second, third) == (100, 100, 100)


def test_a_holder_of_little_memory_keeps_the_last_unit_of_many() -> None:
    """Two units are all that a holds, and the first one takes it longer than the others theirs."""
    devices = (
        ClusterDevice("a", 18, holder=True),
        ClusterDevice("b", 10**6),
        ClusterDevice("c", 10**6),
    )
    model = planning_examples.profile([(1e3, 1e3), *[(1.0, 1.0)] * (MANY - 1)], parameter_bytes=3)
    question = asked(model, Cluster(devices, planning_examples.FREE))
    assert question.cost.held_bytes(0, 2) == 18
    assert borders_of(question) == (0, 1, 150, MANY - 1, MANY)


@pytest.mark.parametrize("seed", range(20))
def test_with_every_place_to_cut_the_likely_ones_are_the_most_equal(seed: int) -> None:
    random, units = Random(seed), 7
    tables = [range_sums(np.array([random.randint(1, 9) for _ in range(units)])) for _ in range(3)]
    for table in tables:
        table[table > random.randint(10, 30)] = np.inf
    tables.append(tables[0])
    lasts = range(3, units)
    likely = list(equal_shares.likely_lasts(tables, lasts, range(units + 1)))
    slowest = [_slowest(tables, borders) for borders in likely]
    assert slowest == sorted(slowest)
    possible = {last for last in lasts if _possible(tables, last)}
    assert {borders[-2] for borders in likely} == possible


def _slowest(tables: Sequence[Floats], borders: Sequence[int]) -> float:
    """Of the stages, the first and the last of which are one device's."""
    first, *inner, last = (
        float(table[units]) for table, units in zip(tables, pairwise(borders), strict=True)
    )
    return max(first + last, *inner)


def _possible(tables: Sequence[Floats], last: int) -> bool:
    cuts = [(0, *inner, last) for inner in combinations(range(1, last), 2)]
    return any(
        np.isfinite(sum(table[units] for table, units in zip(tables, pairwise(each), strict=False)))
        and np.isfinite(tables[-1][last, -1])
        for each in cuts
    )
