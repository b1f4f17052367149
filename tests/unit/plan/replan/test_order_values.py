from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.replan.order_cuts import Order, OrderCuts
from p2ptrain.plan.replan.order_moves import Reshaper
from p2ptrain.plan.replan.order_values import OrderValues
from p2ptrain.plan.search.balanced_groups import UnplacedGroup
from p2ptrain.plan.types.allocation import EVERY_ALLOCATION, BatchSplit
from tests.support import planning_examples
from tests.support.thorough import examples_of

SPLIT = BatchSplit(16, 2)
WEIGHTS = (1.0, 4.0)


@st.composite
def questions(draw: st.DrawFn) -> tuple[CostModel, list[Order], list[int], bool]:
    """Orders near a random one, and where cuts may lie."""
    cost = CostModel(
        draw(planning_examples.profiles()), draw(planning_examples.clusters(most_devices=4))
    )
    private = draw(st.booleans())
    inner = [d for d in range(len(cost.devices)) if not (private and d == cost.holder)]
    assume(inner)
    parts = [UnplacedGroup((device,)) for device in draw(st.permutations(inner))]
    if len(parts) > 2 and draw(st.booleans()):
        pair = (*parts[0].devices, *parts[1].devices)
        parts[:2] = [UnplacedGroup(pair, draw(st.sampled_from(sorted(EVERY_ALLOCATION))))]
    ends = [UnplacedGroup((cost.holder,))] if private else []
    reshaper = Reshaper(frozenset(), private, EVERY_ALLOCATION, cost.unit_count, cost.holder)
    orders = reshaper.near((*ends, *parts, *ends), [], 12)
    middle = draw(st.sets(st.integers(1, cost.unit_count - 1))) if cost.unit_count > 1 else set()
    places = [0, *sorted(middle), cost.unit_count]
    return cost, [order for order in orders if len(order) < len(places)], places, private


@given(questions())
@settings(derandomize=True, deadline=None, max_examples=examples_of(13))
def test_shared_suffixes_give_the_values_of_the_whole_programme(
    question: tuple[CostModel, list[Order], list[int], bool],
) -> None:
    cost, orders, places, private = question
    whole = OrderCuts(cost, SPLIT, {}, private=private)
    values = OrderValues(OrderCuts(cost, SPLIT, {}, private=private, places=places), WEIGHTS)
    middle = len(orders) // 2
    found = [
        value for some in (orders[:middle], orders[middle:]) if some for value in values.of(some)
    ]
    for order, value in zip(orders, found, strict=True):
        expected, _ = whole.solve([order] * len(WEIGHTS), places, None, WEIGHTS)
        least = float(np.min(expected))
        assert value == least or math.isclose(value, least, rel_tol=1e-5), order


@pytest.mark.parametrize("private", [False, True])
def test_orders_have_no_more_stages_than_there_are_units(*, private: bool) -> None:
    """Those of twenty devices are more than can ever be listed."""
    reshaper = Reshaper(frozenset(), private, EVERY_ALLOCATION, most_stages=3, holder=0)
    orders = list(reshaper.straight(range(20)))
    assert max(map(len, orders)) == 3
    assert len(orders) == (20 if private else 20 + 20 * 19 + 20 * 19 * 18)
