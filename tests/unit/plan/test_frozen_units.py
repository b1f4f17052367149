"""Planning models of which little is trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.errors import PlanError
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.pinned_units import PinnedUnits
from p2ptrain.plan.types.cluster import ClusterLink
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support.planning_examples import cluster, profile

MB = 10**6
SLOW = ClusterLink(bytes_per_s=1.0 * MB, latency_s=0.001)


def adapters(trained_bytes: int | None) -> Profile:
    """Four units of 24 MB each; Adam."""
    model = profile([(0.1, 0.2)] * 4, 1000, 24 * MB, 1000)
    units = tuple(replace(unit, trainable_bytes=trained_bytes) for unit in model.units)
    return replace(model, units=units, optimizer_state_ratio=2.0)


def test_frozen_weights_are_held_once() -> None:
    question = adapters(MB // 4), cluster("a", memory_bytes=300 * MB)
    plan = make_plan(*question, PlanRequest(batch_size=8))
    assert plan.predicted.peak_bytes["a"] < (96 + 3) * MB + 8 * 4000 + 1


def test_a_refusal_says_what_is_frozen() -> None:
    with pytest.raises(PlanError, match="4 times the weights"):
        make_plan(adapters(None), cluster("a", memory_bytes=300 * MB), PlanRequest(batch_size=8))
    with pytest.raises(PlanError, match="the frozen weights and 4 times the 4 MB of trained ones"):
        make_plan(adapters(MB), cluster("a", memory_bytes=90 * MB), PlanRequest(batch_size=8))


@pytest.mark.parametrize("overlap", [False, True])
def test_replicas_sum_the_trained_weights_only(*, overlap: bool) -> None:
    def seconds(trained_bytes: int) -> float:
        question = adapters(trained_bytes), cluster("a", "b", link=SLOW, memory_bytes=10**9)
        request = PlanRequest(batch_size=8, planner="dp", overlap=overlap)
        return make_plan(*question, request).predicted.round_seconds

    assert seconds(0) < seconds(MB) < seconds(24 * MB)
    assert seconds(24 * MB) - seconds(MB) > 80  # 92 MB at 1 MB/s


def test_asynchronously_only_what_is_trained_has_versions() -> None:
    cost = CostModel(adapters(MB), cluster("a"))
    assert cost.peak_bytes(0, 4, 0, versions=3) - cost.peak_bytes(0, 4, 0) == 2 * 4 * MB


def test_folded_units_keep_what_is_frozen() -> None:
    folded = PinnedUnits(4, 2, 1).profile(adapters(MB))
    assert [unit.trained_bytes for unit in folded.units] == [2 * MB, MB, MB]
    assert folded.state(0, 3) == adapters(MB).state(0, 4)
