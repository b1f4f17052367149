from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import PlanError
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft
from p2ptrain.plan.planners import hybrid
from p2ptrain.plan.planners.group_shares import Rows, SampleTimes, divide
from p2ptrain.plan.planners.hybrid import planned
from p2ptrain.plan.planners.hybrid_grid import Grid, make_grid
from p2ptrain.plan.planners.published import inner_part
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples
from tests.support.thorough import examples_of

FAST = ClusterLink(1e9, 0.0)


def stages_of(plan: Plan) -> list[tuple[tuple[int, int], dict[str, int]]]:
    return [(s.units, {device.name: device.share for device in s.devices}) for s in plan.stages]


def test_without_parameters_one_group_has_no_bubbles() -> None:
    """M = 4 of two samples: one group of two 4 · 8 = 32 s, two stages of one 32 + 8 s."""
    profile = planning_examples.profile([(1.0, 1.0)] * 4)
    plan = make_plan(profile, planning_examples.cluster("a", "b"), PlanRequest(8, 2, "hybrid"))
    assert stages_of(plan) == [((0, 4), {"a": 1, "b": 1})]


def test_a_slow_all_reduce_makes_a_pipeline() -> None:
    """The all-reduce of 400 B at 10 B/s takes 40 s; a pipeline costs a bubble of 8 s and links."""
    profile = planning_examples.profile([(1.0, 1.0)] * 4, parameter_bytes=100)
    cluster = planning_examples.cluster("a", "b", link=ClusterLink(10.0, 0.0))
    plan = make_plan(profile, cluster, PlanRequest(8, 2, "hybrid"))
    assert stages_of(plan) == [((0, 2), {"a": 2}), ((2, 4), {"b": 2})]


def test_the_largest_memory_comes_first_and_shares_follow_speed() -> None:
    devices = (
        ClusterDevice("a", 10**6, holder=True),
        ClusterDevice("b", 10**7, slowdown=3.0),
        ClusterDevice("c", 10**8),
    )
    profile = planning_examples.profile([(1.0, 1.0)] * 7)
    plan = make_plan(profile, Cluster(devices, FAST), PlanRequest(70, 7, "hybrid"))
    assert stages_of(plan) == [((0, 7), {"c": 3, "b": 1, "a": 3})]


def test_a_device_without_room_has_no_samples_and_a_reason() -> None:
    profile = planning_examples.profile([(1.0, 1.0)] * 4, activation_bytes=10)
    devices = ClusterDevice("a", 10**6, holder=True), ClusterDevice("watch", 9)
    plan = make_plan(profile, Cluster(devices, FAST), PlanRequest(8, 2, "hybrid"))
    assert stages_of(plan) == [((0, 4), {"a": 2})]
    (out,) = plan.left_out
    assert out.name == "watch"
    assert "this one's 9 bytes are too little" in out.reason


def test_memory_counts_the_warm_up_depth() -> None:
    """Two units hold 600 B, and in stage 0 of two 3 · 2 samples of 20 B: 720 B in all."""
    profile = planning_examples.profile([(1.0, 1.0)] * 4, parameter_bytes=100, activation_bytes=10)
    for memory, depth in ((720, 3), (719, 2)):
        cluster = planning_examples.cluster(
            "a", "b", link=ClusterLink(10.0, 0.0), memory_bytes=memory
        )
        plan = make_plan(profile, cluster, PlanRequest(8, 2, "hybrid"))
        assert [(stage.units, stage.warmup) for stage in plan.stages] == [
            ((0, 2), depth),
            ((2, 4), 1),
        ]


def test_private_stages_are_one_deeper_for_the_holders_last() -> None:
    """The stage between the ends keeps 3 micro-batches: 3 · 2 samples of 2 units fill c's 120 B."""
    profile = planning_examples.profile([(1.0, 1.0)] * 4, activation_bytes=10)
    devices = (
        ClusterDevice("a", 10**6, holder=True),
        ClusterDevice("b", 10**6),
        ClusterDevice("c", 120),
    )
    plan = make_plan(profile, Cluster(devices, FAST), PlanRequest(24, 6, "hybrid", private=True))
    assert stages_of(plan)[1] == ((1, 3), {"b": 4, "c": 2})
    assert plan.stages[1].warmup == 3


def test_depth_is_given_up_before_nothing_fits() -> None:
    profile = planning_examples.profile([(1.0, 1.0)] * 4, parameter_bytes=100, activation_bytes=10)
    cluster = planning_examples.cluster("a", "b", memory_bytes=640)
    plan = make_plan(profile, cluster, PlanRequest(8, 2, "hybrid"))
    assert [(stage.units, stage.warmup) for stage in plan.stages] == [((0, 2), 1), ((2, 4), 1)]


def test_private_data_stay_with_the_holder() -> None:
    cluster = planning_examples.cluster("m", "z", "a")
    profile = planning_examples.profile([(1.0, 1.0)] * 4)
    plan = make_plan(profile, cluster, PlanRequest(8, 2, "hybrid", private=True))
    assert stages_of(plan) == [
        ((0, 1), {"m": 2}),
        ((1, 3), {"a": 1, "z": 1}),
        ((3, 4), {"m": 2}),
    ]


def test_groups_must_be_allowed() -> None:
    cluster = planning_examples.cluster("a", "b")
    with pytest.raises(PlanError, match="planner hybrid gives layers to several devices"):
        make_plan(
            planning_examples.profile([(1.0, 1.0)]),
            cluster,
            PlanRequest(8, planner="hybrid", groups=False),
        )


@dataclass(frozen=True)
class Step:
    """A stage or a link of the paper's model."""

    forward: float
    backward: float
    reduce: float = 0.0


def latency(steps: Sequence[Step], rounds: int) -> float:
    """Eq. 4 to 6 from their definitions."""
    both = [step.forward + step.backward for step in steps]
    aligned = [rounds * both[s] + sum(both[:s]) for s in range(len(steps))]
    dominant = aligned.index(max(aligned))
    total = []
    for s, step in enumerate(steps):
        waiting = sum(before.forward for before in steps[:s])
        executing = rounds * both[dominant]
        if s < dominant:
            executing += sum(both[s:dominant])
        else:
            executing -= sum(both[dominant:s])
        total.append(waiting + executing + step.reduce)
    return max(total)


class Oracle:
    """The paper's estimate of any pipeline of neighbours in the order of memory."""

    def __init__(self, cost: CostModel, split: BatchSplit) -> None:
        self.cost, self.split = cost, split
        memory = [device.memory_bytes for device in cost.devices]
        self.order = sorted(range(len(memory)), key=lambda d: (-memory[d], cost.name(d)))
        self.times = SampleTimes(cost, split.first_samples)

    def seconds(self, stages: Sequence[tuple[int, int, tuple[int, ...]]]) -> float:
        """Round latency of (first unit, end unit, devices) stages; inf where memory is short."""
        steps: list[Step] = []
        for p, (first, end, group) in enumerate(stages):
            if p:
                steps.append(self.link(stages[p - 1][2], group, first))
            depth = min(2 * (len(stages) - p) - 1, self.split.micro_batches)
            steps.append(self.stage(first, end, group, depth))
        if any(math.isinf(step.forward) for step in steps):
            return math.inf
        return latency(steps, self.split.micro_batches)

    def link(self, before: tuple[int, ...], after: tuple[int, ...], cut: int) -> Step:
        carried = self.cost.cut_bytes(cut) * self.split.first_samples
        there = min(self.cost.link(a, b).bytes_per_s for a in before for b in after)
        back = min(self.cost.link(b, a).bytes_per_s for a in before for b in after)
        return Step(carried / there, carried / back)

    def stage(self, first: int, end: int, group: tuple[int, ...], depth: int) -> Step:
        cost, room = self.cost, []
        for device in group:
            memory = cost.devices[device].memory_bytes
            room.append(max(0, cost.samples_that_fit(first, end, memory)) // depth)
        rows = Rows(np.array([group]), np.array([first]), np.array([end]))
        limits = np.array([[min(most, 1000) for most in room]])
        found = divide(self.times, rows, self.split.first_samples, limits)
        count, reduce = len(group), 0.0
        if count > 1:
            rate = min(cost.link(a, b).bytes_per_s for a in group for b in group if a != b)
            reduce = 2 * (count - 1) * cost.state(first, end).summed_bytes / (count * rate)
        return Step(float(found.forward[0]), float(found.backward[0]), reduce)

    def every(self) -> Iterator[list[tuple[int, int, tuple[int, ...]]]]:
        units, count = self.cost.unit_count, len(self.order)
        for stages in range(1, min(units, count) + 1):
            for cuts in combinations(range(1, units), stages - 1):
                for steps in combinations(range(1, count), stages - 1):
                    places = pairwise((0, *steps, count))
                    borders = pairwise((0, *cuts, units))
                    yield [
                        (first, end, tuple(self.order[a:b]))
                        for (first, end), (a, b) in zip(borders, places, strict=True)
                    ]


def test_latency_of_a_pipeline_computed_by_hand() -> None:
    """Two stages of (2, 4) and (3, 5) over a link of (1, 1), four micro-batches.

    Aligned totals 24, 8 + 6, 32 + 8: the last dominates with 32. Stage 0: 0 + 32 + 8 = 40, the
    link: 2 + 32 + 2 = 36, stage 1: 3 + 32 + its all-reduce of 9 = 44.
    """
    assert latency([Step(2, 4), Step(1, 1), Step(3, 5)], 4) == 40
    assert latency([Step(2, 4), Step(1, 1), Step(3, 5, reduce=9)], 4) == 44


def stages_of_draft(draft: Draft) -> list[tuple[int, int, tuple[int, ...]]]:
    pairs = zip(draft.units, draft.groups, strict=True)
    return [(first, end, group.devices) for (first, end), group in pairs]


def exact(cost: CostModel, split: BatchSplit) -> tuple[Grid, SampleTimes]:
    part = inner_part(Question(Judge(cost, 0), (split,), tuple(range(len(cost.devices)))))
    return make_grid(part, 100, 100), SampleTimes(cost, split.first_samples)


INSTANCES = (
    planning_examples.profiles(most_units=4),
    planning_examples.clusters(most_devices=4),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([0, 1, 40]),
    st.sampled_from([0, 1, 10]),
)


@settings(max_examples=examples_of(20), deadline=None, derandomize=True)
@given(*INSTANCES)
def test_a_plans_latency_is_what_the_papers_equations_say(
    profile: Profile, cluster: Cluster, micro_batch: int, parameters: int, outputs: int
) -> None:
    """And, without all-reduce, nothing enumerated is better: then Algorithm 2 is exact.

    With it the best pipeline may have a suffix that is not the best of its own.
    """
    cost = CostModel(planning_examples.heavier(profile, parameters, outputs), cluster)
    split = BatchSplit(16, micro_batch)
    oracle = Oracle(cost, split)
    best = min(oracle.seconds(stages) for stages in oracle.every())
    plan = planned(*exact(cost, split), split)
    if math.isfinite(best):
        assert plan is not None
        assert plan.seconds >= best * (1 - 1e-9)
        assert plan.seconds == pytest.approx(oracle.seconds(stages_of_draft(plan.draft)))
        if not parameters:
            assert plan.seconds == pytest.approx(best)


def test_a_coarse_grid_is_nearly_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve units on twelve devices in blocks of two and steps of two."""
    for seed in range(4):
        profile, cluster = planning_examples.household(seed, units=12, devices=8)
        request = PlanRequest(128, 16, "hybrid")
        plain = make_plan(profile, cluster, request).predicted.round_seconds
        with monkeypatch.context() as patch:
            patch.setattr(hybrid, "EXACT_UNITS", 1)
            patch.setattr(hybrid, "FINE", ((10**9, 6, 4),))
            coarse = make_plan(profile, cluster, request).predicted.round_seconds
        assert coarse <= plain * 1.5, seed


def test_two_hundred_units_on_six_devices_use_all_of_them() -> None:
    profile, cluster = planning_examples.household(1, units=213, devices=6)
    plan = make_plan(profile, cluster, PlanRequest(128, planner="hybrid"))
    assert {device.name for stage in plan.stages for device in stage.devices} == {
        f"device{i}" for i in range(6)
    }
