from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import PlanError
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft
from p2ptrain.plan.planners.pipedream import partitioned
from p2ptrain.plan.planners.published import Inner, inner_part
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.profile import Profile, Unit
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples
from tests.support.thorough import examples_of


def two_units(tail_parameters: int) -> Profile:
    """A front of 4 s a sample without parameters, a tail of 2 s with them."""
    base = planning_examples.profile([(2.0, 2.0), (1.0, 1.0)])
    units = Unit("front", 0, 1, 0), Unit("tail", tail_parameters, 1, 0)
    return replace(base, units=units)


def test_a_compute_heavy_front_is_replicated_and_a_parameter_heavy_tail_is_not() -> None:
    """Ten samples on three devices, 10 B/s, 1000 B of parameters in the tail.

    Front on two and tail on one: max(40 / 2, 20) = 20 s. All in one stage of three:
    max(60, 4 · 2/3 · 1000 / 10) / 3 = 89 s. Tail on two: max(40, 200 / 2) = 100 s.
    """
    cluster = planning_examples.cluster("a", "b", "c", link=ClusterLink(10.0, 0.0))
    plan = make_plan(two_units(1000), cluster, PlanRequest(10, 1, "pipedream"))
    stages = [(stage.units, [d.name for d in stage.devices]) for stage in plan.stages]
    assert stages == [((0, 1), ["a", "b"]), ((1, 2), ["c"])]


def test_gradients_summed_are_weighed_against_outputs_sent() -> None:
    """Two units of 10 s a mini-batch and 100 B, on two devices at 10 B/s.

    One stage: max(20, 4 · 1/2 · 200 / 10) / 2 = 20 s. Two: max(10, 2 · 10 a / 10), which is 14 s
    for outputs of 7 B a sample and 24 s for 12 B.
    """
    cluster = planning_examples.cluster("a", "b", link=ClusterLink(10.0, 0.0))
    for output_bytes, stages in ((7, 2), (12, 1)):
        profile = planning_examples.profile([(0.5, 0.5)] * 2, output_bytes, parameter_bytes=100)
        plan = make_plan(profile, cluster, PlanRequest(10, 1, "pipedream"))
        assert len(plan.stages) == stages


def test_without_parameters_one_replicated_stage_is_as_good_as_any() -> None:
    """60 / 3 = 20 s, as above; a tie stays with one stage."""
    cluster = planning_examples.cluster("a", "b", "c", link=ClusterLink(10.0, 0.0))
    plan = make_plan(two_units(0), cluster, PlanRequest(12, 1, "pipedream"))
    (stage,) = plan.stages
    assert stage.allocation is Allocation.MICRO_BATCHES
    assert [(device.name, device.share) for device in stage.devices] == [
        ("a", 4),
        ("b", 4),
        ("c", 4),
    ]


def test_samples_are_divided_where_that_is_more_even() -> None:
    """Three devices and four micro-batches of six samples: 2 2 2 rather than 2 1 1."""
    cluster = planning_examples.cluster("a", "b", "c", link=ClusterLink(1e9, 0.0))
    plan = make_plan(two_units(0), cluster, PlanRequest(24, 6, "pipedream"))
    (stage,) = plan.stages
    assert stage.allocation is Allocation.SAMPLES
    assert [device.share for device in stage.devices] == [2, 2, 2]


def test_asynchronously_whole_mini_batches_are_dealt_in_noam_depths() -> None:
    """Three devices, all in the input stage: NOAM = 1 for each."""
    cluster = planning_examples.cluster("a", "b", "c", link=ClusterLink(1e9, 0.0))
    plan = make_plan(
        two_units(0), cluster, PlanRequest(6, planner="pipedream", mode=PlanMode.ASYNC)
    )
    (stage,) = plan.stages
    assert stage.allocation is Allocation.MICRO_BATCHES
    assert stage.warmup == 3
    tail = make_plan(
        two_units(1000),
        planning_examples.cluster("a", "b", "c", link=ClusterLink(10.0, 0.0)),
        PlanRequest(10, planner="pipedream", mode=PlanMode.ASYNC),
    )
    assert [(len(stage.devices), stage.warmup) for stage in tail.stages] == [(2, 3), (1, 1)]


def test_speeds_are_averaged_away() -> None:
    """The paper's devices are equal: the slow one gets the same share."""
    devices = ClusterDevice("a", 10**6, holder=True), ClusterDevice("b", 10**6, slowdown=9.0)
    cluster = Cluster(devices, ClusterLink(1e9, 0.0))
    plan = make_plan(two_units(0), cluster, PlanRequest(8, 1, "pipedream"))
    assert [device.share for device in plan.stages[0].devices] == [4, 4]


def test_private_data_stay_with_the_holder() -> None:
    profile = planning_examples.profile([(1.0, 1.0)] * 4)
    cluster = planning_examples.cluster("m", "z", "a")
    plan = make_plan(profile, cluster, PlanRequest(8, 1, "pipedream", private=True))
    assert [(stage.units, [d.name for d in stage.devices]) for stage in plan.stages] == [
        ((0, 1), ["m"]),
        ((1, 3), ["a", "z"]),
        ((3, 4), ["m"]),
    ]
    with pytest.raises(PlanError, match="2 layers for 3 parts"):
        make_plan(two_units(0), cluster, PlanRequest(8, 1, "pipedream", private=True))


def test_groups_must_be_allowed() -> None:
    cluster = planning_examples.cluster("a", "b")
    with pytest.raises(PlanError, match="planner pipedream gives layers to several devices"):
        make_plan(two_units(0), cluster, PlanRequest(8, 1, "pipedream", groups=False))


def slowest(part: Inner, split: BatchSplit, stages: Stages) -> float:
    """The paper's objective for (first, end, devices) stages, from its definition."""
    cost, devices = part.cost, range(len(part.cost.devices))
    rates = [cost.link(a, b).bytes_per_s for a in devices for b in devices if a != b]
    rate = sum(rates) / len(rates) if rates else math.inf
    rounds = split.batch_size / split.first_samples
    seconds = 0.0
    for first, end, count in stages:
        each = [sum(cost.stage_seconds(d, first, end, split.first_samples)) for d in devices]
        work = sum(each) / len(each) * rounds
        sync = 4 * (count - 1) / count * cost.state(first, end).summed_bytes / rate
        seconds = max(seconds, max(work, sync) / count)
        if first:
            seconds = max(seconds, 2 * cost.cut_bytes(first) * split.batch_size / rate)
    return seconds


def fits(part: Inner, split: BatchSplit, stages: Stages) -> bool:
    """Whether list order gives every stage devices that hold it with a micro-batch in flight."""
    left = list(part.devices)
    for first, end, count in stages:
        group, left = left[:count], left[count:]
        deals = -(-split.micro_batches // count) / split.micro_batches
        divides = -(-split.first_samples // count) / split.first_samples
        samples = split.first_samples
        if count > 1 and (count > split.micro_batches or divides < deals):
            samples = -(-samples // count)
        if count > max(split.micro_batches, split.first_samples):
            return False
        memory = min(part.cost.devices[d].memory_bytes for d in group)
        if part.cost.peak_bytes(first, end, samples) > memory:
            return False
    return True


Stages = tuple[tuple[int, int, int], ...]


def every_plan(units: int, devices: int) -> Iterator[Stages]:
    for stages in range(1, min(units, devices) + 1):
        for cuts in combinations(range(1, units), stages - 1):
            for steps in combinations(range(1, devices), stages - 1):
                borders, places = pairwise((0, *cuts, units)), pairwise((0, *steps, devices))
                pairs = zip(borders, places, strict=True)
                yield tuple((i, j, b - a) for (i, j), (a, b) in pairs)


def stages_of(draft: Draft) -> Stages:
    pairs = zip(draft.units, draft.groups, strict=True)
    return tuple((i, j, len(group.devices)) for (i, j), group in pairs)


@settings(max_examples=examples_of(13), deadline=None, derandomize=True)
@given(
    planning_examples.profiles(),
    planning_examples.clusters(most_devices=5),
    st.sampled_from([2, 8]),
    st.sampled_from([0, 1, 40]),
    st.sampled_from([0, 1, 10]),
)
def test_no_partition_has_a_faster_slowest_part(
    profile: Profile, cluster: Cluster, micro_batch: int, parameters: int, outputs: int
) -> None:
    profile = planning_examples.heavier(profile, parameters, outputs)
    cost, split = CostModel(profile, cluster), BatchSplit(16, micro_batch)
    question = Question(Judge(cost, 0), (split,), tuple(range(len(cost.devices))))
    part = inner_part(question)
    plans = every_plan(part.unit_count, len(part.devices))
    possible = [slowest(part, split, plan) for plan in plans if fits(part, split, plan)]
    best = min(possible, default=math.inf)
    draft = partitioned(part, split)
    if math.isfinite(best):
        assert draft is not None
        assert draft.devices == part.devices
        assert slowest(part, split, stages_of(draft)) == pytest.approx(best)


def test_some_instances_replicate_a_part_of_the_pipeline() -> None:
    """Or the property above would say little."""
    kinds = set()
    for seed in range(20):
        profile, cluster = planning_examples.household(seed, units=5, devices=4)
        plan = make_plan(
            planning_examples.heavier(profile, 30 * (seed + 1), 1),
            cluster,
            PlanRequest(64, 8, "pipedream"),
        )
        kinds.add(tuple(len(stage.devices) for stage in plan.stages))
    assert len(kinds) >= 3


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("memory_bytes", [10**9, 5000])
def test_units_that_keep_nothing_on_more_devices_than_samples(memory_bytes: int) -> None:
    """Three devices for two samples, units without activations: neither inf * 0 nor 0 * inf.

    Each unit needs 3000 bytes, so that with 5000 no device could hold the whole model.
    """
    profile = planning_examples.profile([(0.1, 0.2)] * 3, parameter_bytes=1000, activation_bytes=0)
    house = planning_examples.cluster(
        "a", "b", "c", link=ClusterLink(1e9, 0.0), memory_bytes=memory_bytes
    )
    plan = make_plan(profile, house, PlanRequest(2, planner="pipedream"))
    assert {share.name for stage in plan.stages for share in stage.devices} == {"a", "b", "c"}


@settings(max_examples=examples_of(20), deadline=None)
@given(st.lists(st.floats(0.1, 5.0), min_size=3, max_size=7), st.integers(0, 40))
def test_asynchronous_stages_of_one_device_are_cut_as_for_equal_devices(
    seconds: list[float], output_bytes: int
) -> None:
    """Where no stage may have several: the least slowest part of all cuts in list order."""
    profile = planning_examples.profile([(s, s) for s in seconds], output_bytes)
    cluster = planning_examples.cluster("a", "b", "c", link=ClusterLink(10.0, 0.0))
    request = PlanRequest(1, planner="pipedream", mode=PlanMode.ASYNC, groups=False)
    plan = make_plan(profile, cluster, request)
    assert [[d.name for d in stage.devices] for stage in plan.stages] == [["a"], ["b"], ["c"]]
    hop = 2 * output_bytes / 10.0

    def slowest(borders: tuple[int, ...]) -> float:
        parts = [sum(seconds[i:j]) * 2 for i, j in pairwise((0, *borders, len(seconds)))]
        return max(*parts, hop)

    best = min(slowest(two) for two in combinations(range(1, len(seconds)), 2))
    found = tuple(stage.units[0] for stage in plan.stages[1:])
    assert slowest(found) == pytest.approx(best)


def test_asynchronous_stages_of_one_device_need_a_unit_each() -> None:
    cluster = planning_examples.cluster("a", "b", "c", link=ClusterLink(10.0, 0.0))
    request = PlanRequest(1, planner="pipedream", mode=PlanMode.ASYNC, groups=False)
    with pytest.raises(PlanError, match="2 layers for 3 parts"):
        make_plan(two_units(0), cluster, request)
