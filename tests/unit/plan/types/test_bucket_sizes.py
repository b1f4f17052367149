"""Little where links wait for it, and no smaller than messages are worth."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.types.cluster import ClusterLink
from p2ptrain.plan.types.gradient_sums import MAX_BYTES, MIN_BYTES, USUAL, BucketSizes
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples


@pytest.mark.parametrize(
    ("bytes_per_s", "least_bytes"),
    [
        (1.0, MIN_BYTES),
        (12.5e6, MIN_BYTES),
        (25e6, 2_000_000),
        (125e6, MAX_BYTES),
        (float("inf"), MAX_BYTES),
    ],
)
def test_faster_links_carry_larger_ones(bytes_per_s: float, least_bytes: int) -> None:
    assert BucketSizes.at(bytes_per_s).least_bytes == least_bytes


@given(st.floats(1.0, 1e12), st.integers(1, 1 << 30))
def test_those_between_are_larger(bytes_per_s: float, total: int) -> None:
    sizes, found = BucketSizes.at(bytes_per_s), list[int]()
    while (before := sum(found)) < total:
        found.append(sizes.next_bytes(before, total - before))
    assert all(sizes.least_bytes <= size <= MAX_BYTES for size in found)
    assert found[0] == sizes.least_bytes
    if len(found) > 2:
        assert found[-1] <= found[-2] or found[-1] == sizes.least_bytes


def test_the_slowest_link_of_a_ring_counts() -> None:
    cluster = planning_examples.cluster("a", "b", "c", link=ClusterLink(125e6, 0.0))
    slow = replace(cluster, links={**cluster.links, ("c", "a"): ClusterLink(25e6, 0.0)})
    profile = planning_examples.profile([(1.0, 1.0)] * 2, parameter_bytes=MIN_BYTES)
    for known, least in ((cluster, MAX_BYTES), (slow, 2_000_000)):
        cost = CostModel(profile, known, overlap=True)
        assert cost.bucket_sizes((0, 1, 2)).least_bytes == least
        assert cost.bucket_sizes((1,)) == USUAL
        plan = make_plan(profile, known, PlanRequest(batch_size=6, planner="dp", overlap=True))
        assert [stage.bucket_bytes for stage in plan.stages] == [least]
        assert plan == type(plan).from_json(plan.to_json())
        assert CostModel(profile, known).bucket_sizes((0, 1, 2)) == USUAL
