"""Shapes of many replicas and a short tail: found, even, and in `auto`'s plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.problem.micro_batch_sizes import MAX_WINDOW, even_window
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.search.replicated import best_replicated, replicated_candidates
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support.equal_devices import equal, vgg_like
from tests.support.planning_examples import quick_request


def question(count: int, mode: PlanMode) -> tuple[Question, BatchSplit]:
    cost = CostModel(vgg_like(), equal(count), mode=mode)
    split = BatchSplit(32, 1)
    return Question(Judge(cost, 200_000), [split], tuple(range(count))), split


@pytest.mark.parametrize(
    ("replicas", "window"),
    [((15, 1), 45), ((16,), 32), ((12, 3, 1), 36), ((40,), 40), ((5, 7), 35)],
)
def test_windows_are_even_and_not_shorter_than_usual(
    replicas: tuple[int, ...], window: int
) -> None:
    assert even_window(BatchSplit(32 * 8, 8), replicas) == BatchSplit(window * 8, 8)


def test_windows_too_long_to_simulate_stay_uneven() -> None:
    split = BatchSplit(32, 1)
    assert MAX_WINDOW < 17 * 19
    assert even_window(split, (17, 19)) is split


def test_asynchronous_replicas_take_equal_turns() -> None:
    asked, split = question(11, PlanMode.ASYNC)
    shapes = {
        tuple(len(group.devices) for group in d.groups): d
        for d in replicated_candidates(asked, split)
    }
    assert {(11,), (10, 1), (9, 1, 1), (7, 3, 1), (1,) * 11} <= set(shapes)
    for replicas, draft in shapes.items():
        assert [sum(group.shares) for group in draft.groups if group.deals] == [
            draft.split.micro_batches for count in replicas if count > 1
        ]
        assert all(len(set(group.shares)) == 1 for group in draft.groups)


def test_no_shape_where_the_holder_must_keep_both_ends() -> None:
    asked, split = question(8, PlanMode.SYNC)
    assert replicated_candidates(asked, split)
    assert replicated_candidates(replace(asked, private=True), split) == []
    assert replicated_candidates(replace(asked, groups=False), split) == []


def test_the_heavy_end_gets_a_device_of_its_own() -> None:
    asked, split = question(11, PlanMode.ASYNC)
    best = best_replicated(asked, split, reserve_tasks=0)
    assert best is not None
    assert len(best.draft.groups[-1].devices) == 1
    assert best.draft.units[-1][1] == len(vgg_like().units)
    # Ten replicas that never wait: a tenth of the time of all the convolutions they have.
    convolutions = 0.03 * best.draft.borders[-2] / 10
    assert best.seconds == pytest.approx(convolutions, rel=0.05)


def test_reasons_of_an_asynchronous_plan_speak_of_mini_batches() -> None:
    slow = ClusterDevice("slow", 16 * 10**9, 500.0)
    cluster = Cluster((*equal(2).devices, slow), ClusterLink(1.25e9, 50e-6))
    plan = make_plan(vgg_like(), cluster, quick_request(1, mode=PlanMode.ASYNC))
    (out,) = plan.left_out
    assert out.name == "slow"
    assert out.reason.startswith("with it a batch would take ")
    assert "round" not in out.reason
