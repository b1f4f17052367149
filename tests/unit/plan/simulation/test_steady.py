from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import OptionError, PlanError
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import (
    Draft,
    StageGroup,
    alone,
    draft_groups,
    draft_pipeline,
    peak_bytes,
)
from p2ptrain.plan.cost.overlap import FEED_MESSAGES, LOAD_MESSAGES, ROUND_MESSAGES
from p2ptrain.plan.simulation import steady
from p2ptrain.plan.simulation.bound import lower_bound
from p2ptrain.plan.simulation.engine import Engine
from p2ptrain.plan.simulation.lanes import build_engine
from p2ptrain.plan.simulation.simulate import simulate, simulate_steady
from p2ptrain.plan.simulation.steady import endless, run_steadily, simulated_tasks, steady_seconds
from p2ptrain.plan.types.allocation import Allocation, BatchSplit, deal
from p2ptrain.plan.types.cluster import REFERENCE, Cluster, ClusterLink
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples
from tests.support.planning_examples import quick_request
from tests.support.thorough import examples_of
from tests.unit.plan.simulation.naive import naive_steady_seconds

PICTURE = """
    stage 0   F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 F6
    stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4
    stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5
"""
ONE_EACH = BatchSplit(8, 1)
TURNS = Allocation.MICRO_BATCHES


def asynchronous(profile: Profile, cluster: Cluster, *, overlap: bool = False) -> CostModel:
    return CostModel(profile, cluster, mode=PlanMode.ASYNC, overlap=overlap)


def pipeline(cost: CostModel, *devices: int, split: BatchSplit = ONE_EACH) -> Draft:
    """A unit a device."""
    draft = draft_pipeline(cost, split, range(len(devices) + 1), devices)
    assert draft is not None
    return draft


def three_stages(
    link: ClusterLink = planning_examples.FREE, output_bytes: int = 1
) -> tuple[CostModel, Draft]:
    profile = planning_examples.profile([(1.0, 1.0)] * 3, output_bytes=output_bytes)
    cost = asynchronous(profile, planning_examples.cluster("a", "b", "c", link=link))
    return cost, pipeline(cost, 0, 1, 2)


def test_the_picture_is_what_three_stages_do() -> None:
    cost, draft = three_stages(output_bytes=0)
    engine = run_steadily(cost, draft, record=True).engine
    ticks = [["."] * 13 for _ in range(3)]
    for span in engine.spans:
        if span.kind is not None and span.start_seconds < 13:
            letter = span.kind[0].upper()
            ticks[span.lane][round(span.start_seconds)] = f"{letter}{span.micro_batch}"
    lines = [
        f"    stage {p}   {' '.join(f'{tick:2}' for tick in line)}".rstrip()
        for p, line in enumerate(ticks)
    ]
    assert "\n".join(lines) == PICTURE.strip("\n")
    assert PICTURE in (steady.__doc__ or "")


def test_depths_are_the_stages_to_the_end() -> None:
    _, draft = three_stages()
    assert draft.warmup == (3, 2, 1)


def test_deeper_than_noam_is_never_drafted() -> None:
    cost, draft = three_stages()
    deep = draft_groups(cost, draft.split, draft.borders, draft.groups, (8, 8, 8))
    assert deep == draft


def test_replicas_that_take_turns_count_in_the_depth_and_dividing_ones_do_not() -> None:
    profile = planning_examples.profile([(1.0, 1.0)] * 2)
    cost = asynchronous(profile, planning_examples.cluster("a", "b", "c", "d"))
    split = BatchSplit(16, 2)
    turns, dividing = StageGroup((0, 1), (5, 3), TURNS), StageGroup((2, 3), (1, 1))
    drafts = [
        draft_groups(cost, split, (0, 1, 2), groups)
        for groups in ((turns, dividing), (dividing, turns))
    ]
    assert [draft and draft.warmup for draft in drafts] == [(3, 1), (3, 2)]


def test_a_balanced_pipeline_is_always_busy() -> None:
    cost, draft = three_stages()
    simulation = simulate_steady(cost, draft, timeline=True)
    assert simulation.round_seconds == pytest.approx(2.0)
    length = max(entry.end_seconds for entry in simulation.timeline)
    for name in "abc":
        computing = sum(
            entry.end_seconds - entry.start_seconds
            for entry in simulation.timeline
            if entry.device == name and entry.kind in ("forward", "backward")
        )
        assert computing >= 0.95 * length
        assert simulation.busy_share[name] >= 0.95


def test_with_free_links_the_slowest_stage_sets_the_pace() -> None:
    profile = planning_examples.profile([(1.0, 2.0), (2.0, 5.0), (1.0, 1.0)])
    cost = asynchronous(profile, planning_examples.cluster("a", "b", "c"))
    assert steady_seconds(cost, pipeline(cost, 0, 1, 2)) == pytest.approx(7.0)


def test_a_slow_link_sets_the_pace() -> None:
    # Outputs of 5 bytes at 1 byte/s, and behind it as many gradients on the other direction.
    profile = planning_examples.profile([(1.0, 1.0)] * 2, output_bytes=5)
    cost = asynchronous(profile, planning_examples.cluster("a", "b", link=ClusterLink(1.0, 0.0)))
    deep = replace(pipeline(cost, 0, 1), warmup=(8, 1))
    assert steady_seconds(cost, deep) == pytest.approx(5.0)


def test_a_shallow_pipeline_waits_for_the_way_back() -> None:
    # Two mini-batches are under way, each for 2 s at both ends and 5 s on the way there and back.
    profile = planning_examples.profile([(1.0, 1.0)] * 2, output_bytes=5)
    cost = asynchronous(profile, planning_examples.cluster("a", "b", link=ClusterLink(1.0, 0.0)))
    assert steady_seconds(cost, pipeline(cost, 0, 1)) == pytest.approx(14 / 2)


def test_three_replicas_in_turn_are_three_times_as_fast() -> None:
    profile = planning_examples.profile([(1.0, 2.0), (0.5, 0.5)])
    cost = asynchronous(profile, planning_examples.cluster("a", "b", "c", "d"))
    groups = (StageGroup((0, 1, 2), (3, 3, 3), TURNS), alone(BatchSplit(9, 1), 3))
    draft = draft_groups(cost, BatchSplit(9, 1), (0, 1, 2), groups)
    assert draft is not None
    assert steady_seconds(cost, draft) == pytest.approx(1.0)


def test_a_window_of_turns_repeats_itself() -> None:
    shares = (4, 2, 1)
    assert deal(tuple(5 * share for share in shares)) == 5 * deal(shares)


@pytest.mark.parametrize(
    ("group", "seconds"),
    [
        # 2(g-1)/g of 60 bytes at 1 byte/s: one for each mini-batch, or one for two.
        (StageGroup((0, 1), (1, 1)), 60.0),
        (StageGroup((0, 1), (4, 4), TURNS), 30.0),
    ],
)
def test_exchanges_are_hidden_up_to_their_own_time(group: StageGroup, seconds: float) -> None:
    profile = planning_examples.profile([(0.5, 0.5)], parameter_bytes=60)
    cost = asynchronous(profile, planning_examples.cluster("a", "b", link=ClusterLink(1.0, 0.0)))
    split = BatchSplit(16, 2)
    draft = draft_groups(cost, split, (0, 1), (group,))
    assert draft is not None
    assert steady_seconds(cost, draft) == pytest.approx(seconds)
    fast = asynchronous(profile, planning_examples.cluster("a", "b"))
    assert steady_seconds(fast, draft) == pytest.approx(1.0)


def test_the_timeline_shows_exchanges_and_updates_of_the_stretch() -> None:
    profile = planning_examples.profile([(1.0, 1.0)] * 2, parameter_bytes=2)
    cost = asynchronous(
        profile, planning_examples.cluster("a", "b", "c", link=ClusterLink(2.0, 0.0))
    )
    groups = (StageGroup((0, 1), (2, 2), TURNS), alone(BatchSplit(4, 1), 2))
    draft = draft_groups(cost, BatchSplit(4, 1), (0, 1, 2), groups)
    assert draft is not None
    simulation = simulate_steady(cost, draft, timeline=True)
    mini_batches = {
        (entry.kind, entry.device): len([e for e in simulation.timeline if same(e, entry)])
        for entry in simulation.timeline
    }
    assert mini_batches["update", "c"] == pytest.approx(2 * mini_batches["update", "a"], abs=2)
    reduces = [e for e in simulation.timeline if e.kind == "all-reduce" and e.device == "a"]
    inner = reduces[1:-1]
    assert inner
    assert all(e.end_seconds - e.start_seconds == pytest.approx(1.0) for e in inner)
    starts = [entry.start_seconds for entry in simulation.timeline]
    assert starts == sorted(starts)
    assert starts[0] == 0.0


def same(one: object, other: object) -> bool:
    names = ("kind", "device")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def test_memory_counts_a_version_for_each_mini_batch_in_flight() -> None:
    profile = planning_examples.profile([(1.0, 1.0)] * 3, parameter_bytes=10, activation_bytes=7)
    cost = asynchronous(profile, planning_examples.cluster("a", "b", "c"))
    peaks = peak_bytes(cost, pipeline(cost, 0, 1, 2, split=BatchSplit(16, 2)))
    assert peaks == {0: 30 + 20 + 42, 1: 30 + 10 + 28, 2: 30 + 14}


def test_replicas_keep_the_versions_of_their_own_mini_batches() -> None:
    # 4:1 of five, a a b a a: of any three in a row, over the window's border too, a has three.
    profile = planning_examples.profile([(1.0, 1.0)] * 2, parameter_bytes=10, activation_bytes=1)
    cost = asynchronous(profile, planning_examples.cluster("a", "b", "c"))
    groups = (StageGroup((0, 1), (4, 1), TURNS), alone(BatchSplit(5, 1), 2))
    draft = draft_groups(cost, BatchSplit(5, 1), (0, 1, 2), groups)
    assert draft is not None
    assert draft.warmup == (3, 1)
    assert peak_bytes(cost, draft) == {0: 30 + 20 + 3, 1: 30 + 1, 2: 30 + 1}


def test_depth_is_lowered_until_the_versions_fit() -> None:
    profile = planning_examples.profile([(1.0, 1.0)] * 3, parameter_bytes=10)
    cluster = planning_examples.cluster("a", "b", "c", memory_bytes=40)
    draft = pipeline(asynchronous(profile, cluster), 0, 1, 2)
    assert draft.warmup == (2, 2, 1)
    too_small = asynchronous(profile, planning_examples.cluster("a", "b", "c", memory_bytes=29))
    assert draft_pipeline(too_small, ONE_EACH, (0, 1, 2, 3), (0, 1, 2)) is None


def test_what_a_simulation_costs_is_known_before() -> None:
    cost, draft = three_stages()
    engine = run_steadily(cost, draft).engine
    assert simulated_tasks(draft) == sum(len(lane.tasks) for lane in engine.lanes)


def test_a_plan_of_mode_async_is_written_read_and_simulated() -> None:
    profile, cluster = planning_examples.household(1, 8, 3)
    plan = make_plan(profile, cluster, quick_request(16, 4, mode=PlanMode.ASYNC))
    assert plan.mode is PlanMode.ASYNC
    assert plan.micro_batch == 16
    content = plan.to_json()
    assert content["mode"] == "async"
    assert Plan.from_json(content) == plan
    assert Plan.from_json(content, batch_size=16) == plan
    simulation = simulate(plan, profile, cluster)
    assert simulation.round_seconds == plan.predicted.round_seconds
    assert plan.predicted.samples_per_s == pytest.approx(16 / simulation.round_seconds)
    with pytest.raises(OptionError, match="mode"):
        Plan.from_json(content | {"mode": "eventually"})


def test_auto_is_at_least_as_fast_as_the_named_planners() -> None:
    profile, cluster = planning_examples.household(2, 8, 3)
    request = quick_request(16, mode=PlanMode.ASYNC)
    seconds = {
        name: make_plan(profile, cluster, replace(request, planner=name)).predicted.round_seconds
        for name in ("auto", "pp", "single")
    }
    assert seconds["auto"] == min(seconds.values())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_auto_is_as_good_as_every_straight_pipeline(seed: int) -> None:
    profile, cluster = planning_examples.household(seed, 5, 3)
    cost = asynchronous(profile, cluster)
    split = BatchSplit(32 * 16, 16)
    drafts = [
        draft_pipeline(cost, split, (0, *cuts, 5), devices)
        for count in (1, 2, 3)
        for devices in permutations(range(3), count)
        for cuts in combinations(range(1, 5), count - 1)
    ]
    best = min(steady_seconds(cost, draft) for draft in drafts if draft is not None)
    plan = make_plan(profile, cluster, quick_request(16, mode=PlanMode.ASYNC, groups=False))
    assert plan.predicted.round_seconds <= best * 1.02


@settings(max_examples=examples_of(5), deadline=None, derandomize=True)
@given(planning_examples.profiles(), planning_examples.clusters(), st.integers(1, 4), st.booleans())
def test_plans_fit_and_are_predicted_as_they_are_simulated(
    profile: Profile, cluster: Cluster, batch_size: int, private: bool
) -> None:
    request = quick_request(batch_size, private=private, mode=PlanMode.ASYNC)
    try:
        plan = make_plan(profile, cluster, request)
    except PlanError:
        return
    assert plan.split.first_samples == batch_size
    simulation = simulate(plan, profile, cluster)
    assert simulation.round_seconds == plan.predicted.round_seconds
    assert simulation.peak_bytes == plan.predicted.peak_bytes
    for name, peak in simulation.peak_bytes.items():
        assert peak <= cluster.device(name).memory_bytes


def test_messages_and_updates_bound_what_a_tiny_model_reaches() -> None:
    """Two stages that compute a microsecond each: what is left is what a mini-batch costs."""
    profile = planning_examples.profile([(1e-6, 1e-6)] * 2, parameter_bytes=4)
    cluster = planning_examples.cluster("a", "b")
    plain, real = (
        steady_seconds(cost, pipeline(cost, 0, 1))
        for cost in (asynchronous(profile, cluster, overlap=how) for how in (False, True))
    )
    assert plain < 1e-4
    messages = ROUND_MESSAGES + LOAD_MESSAGES + FEED_MESSAGES + 2  # activations, gradients
    assert real == pytest.approx(messages * REFERENCE.message_seconds, rel=0.05)


def test_nothing_fits_is_said_with_versions_counted() -> None:
    profile = planning_examples.profile([(1.0, 1.0)] * 2, parameter_bytes=10)
    cluster = planning_examples.cluster("a", "b", memory_bytes=29)
    with pytest.raises(PlanError, match="30"):
        make_plan(profile, cluster, quick_request(1, mode=PlanMode.ASYNC))


def finished(engine: Engine, mini_batch: int) -> float:
    """When stage 0 has done the backwards of all mini-batches up to that one."""
    return max(
        end
        for lane in engine.lanes
        if lane.stage == 0
        for task, end in zip(lane.tasks, lane.ends, strict=True)
        if task & 1 and task >> 1 <= mini_batch
    )


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Profile, Cluster, tuple[int, ...], tuple[int, ...]]:
    """(profile, cluster, borders, devices) of a straight pipeline."""
    profile = draw(planning_examples.profiles(least_bytes=1))
    cluster = draw(planning_examples.clusters(3, tight=False))
    count = min(len(cluster.devices), len(profile.units))
    devices = draw(st.permutations(range(len(cluster.devices))))[:count]
    lengths = [1] * count
    lengths[draw(st.integers(0, count - 1))] += len(profile.units) - count
    return profile, cluster, (0, *accumulate(lengths)), tuple(devices)


@settings(max_examples=examples_of(5), deadline=None, derandomize=True)
@given(pipelines())
def test_the_naive_simulator_agrees(
    case: tuple[Profile, Cluster, tuple[int, ...], tuple[int, ...]],
) -> None:
    profile, cluster, borders, devices = case
    cost = asynchronous(profile, cluster)
    draft = draft_pipeline(cost, BatchSplit(8, 2), borders, devices)
    assert draft is not None
    first, last = 9, 21
    run = endless(draft, last + draft.warmup[0] + 1)
    names = [cost.name(device) for device in devices]
    plan = planning_examples.straight_plan(
        run.split, *zip(names, run.units, run.warmup, strict=True)
    )
    expected = naive_steady_seconds(plan, profile, cluster, first, last)
    engine = build_engine(cost, run)
    engine.run()
    pace = (finished(engine, last) - finished(engine, first)) / (last - first)
    assert pace == pytest.approx(expected, rel=1e-9)
    # This stretch is another one, of a run that may still be settling.
    assert steady_seconds(cost, draft) == pytest.approx(expected, rel=0.08)


@st.composite
def drafts(draw: st.DrawFn) -> tuple[CostModel, Draft]:
    """Groups of both allocations, on links that sometimes matter."""
    profile, cluster = planning_examples.household(draw(st.integers(0, 99)), 5, 5)
    cost = asynchronous(profile, cluster, overlap=draw(st.booleans()))
    window = draw(st.sampled_from([5, 8]))
    split = BatchSplit(window * 4, 4)
    devices = draw(st.permutations(range(5)))
    sizes = draw(st.sampled_from([(2,), (1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (1, 2, 2)]))
    groups = []
    for size in sizes:
        chosen, devices = tuple(devices[:size]), devices[size:]
        if size == 1:
            groups.append(alone(split, chosen[0]))
        elif draw(st.booleans()):
            groups.append(StageGroup(chosen, (*[1] * (size - 1), window - size + 1), TURNS))
        else:
            groups.append(StageGroup(chosen, (*[1] * (size - 1), 4 - size + 1)))
    draft = draft_groups(cost, split, (*range(len(sizes)), 5), groups)
    assert draft is not None
    return cost, draft


@settings(max_examples=examples_of(15), deadline=None, derandomize=True)
@given(drafts())
def test_a_long_run_has_the_same_pace_and_is_not_faster_than_the_bound(
    case: tuple[CostModel, Draft],
) -> None:
    cost, draft = case
    window = draft.split.micro_batches
    engine = build_engine(cost, endless(draft, 30 * window))
    engine.run()
    first, last = 10 * window, 28 * window
    long_run = (finished(engine, last) - finished(engine, first)) / (last - first)
    exchanges = [
        cost.all_reduce_seconds(group.devices, *units) / (len(group.devices) if group.deals else 1)
        for group, units in zip(draft.groups, draft.units, strict=True)
    ]
    seconds = steady_seconds(cost, draft)
    assert lower_bound(cost, draft) <= max(long_run * 1.005, *exchanges)
    assert seconds == pytest.approx(max(long_run, *exchanges), rel=0.03)
    assert lower_bound(cost, draft) <= seconds
