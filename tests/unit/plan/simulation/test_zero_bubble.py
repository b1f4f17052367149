from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import eq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.overlap import SPLIT_FACTOR
from p2ptrain.plan.simulation.bound import lower_bound
from p2ptrain.plan.simulation.simulate import Simulation, draft_of, simulate
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.cluster import REFERENCE, Cluster, Overheads
from p2ptrain.plan.types.gradient_sums import MIN_BYTES
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.schedule import ScheduleAction, ZeroBubble, one_f_one_b
from p2ptrain.plan.types.unit_times import TimeTable
from tests.support import planning_examples
from tests.support.thorough import examples_of
from tests.unit.plan.simulation.naive import naive_peak_bytes, naive_round_seconds
from tests.unit.plan.simulation.test_overlap import NOTHING, shared_plan, with_overheads
from tests.unit.plan.simulation.test_simulate import rounds


def weighed(profile: Profile, sixteenths: Sequence[int]) -> Profile:
    """Of each backward that part is gradients of weights."""
    times = tuple(
        replace(
            entry,
            weight=tuple(t * n / 16 for t, n in zip(entry.backward, sixteenths, strict=True)),
        )
        for entry in profile.times.times
    )
    return replace(profile, times=TimeTable(profile.times.sizes, times))


def held_plan(plan: Plan, held: Sequence[int | None]) -> Plan:
    stages = tuple(replace(stage, held=n) for stage, n in zip(plan.stages, held, strict=True))
    return replace(plan, stages=stages)


@st.composite
def split_rounds(draw: st.DrawFn) -> tuple[Plan, Profile, Cluster]:
    """As `rounds`, some or all backwards split."""
    plan, profile, cluster = draw(rounds())
    count = plan.micro_batches
    held = [draw(st.one_of(st.none(), st.integers(stage.warmup, count))) for stage in plan.stages]
    sixteenths = [draw(st.integers(0, 16)) for _ in profile.units]
    return held_plan(plan, held), weighed(profile, sixteenths), cluster


def line(simulation: Simulation, stage: int) -> list[ScheduleAction]:
    """What a stage of one device does, in order."""
    return [
        ScheduleAction(entry.kind, entry.micro_batch)
        for entry in simulation.timeline
        if entry.stage == stage
        and entry.micro_batch is not None
        and (entry.kind == "forward" or entry.kind == "backward" or entry.kind == "weight")
    ]


@settings(max_examples=examples_of(20), deadline=None, derandomize=True)
@given(split_rounds())
def test_the_naive_simulator_agrees_and_the_bound_is_below(
    case: tuple[Plan, Profile, Cluster],
) -> None:
    plan, profile, cluster = case
    simulation = simulate(plan, profile, cluster)
    naive = naive_round_seconds(plan, profile, cluster)
    assert simulation.round_seconds == pytest.approx(naive, rel=1e-12)
    assert simulation.peak_bytes == naive_peak_bytes(plan, profile, cluster)
    cost = CostModel(profile, cluster)
    assert lower_bound(cost, draft_of(plan, cost)) <= simulation.round_seconds * (1 + 1e-12)
    assert all(
        busy <= simulation.round_seconds * (1 + 1e-12) for busy in simulation.busy_seconds.values()
    )


@settings(max_examples=examples_of(20), deadline=None, derandomize=True)
@given(
    split_rounds(),
    st.sampled_from([NOTHING, REFERENCE, Overheads(0.5, 0.01, 0.01)]),
    st.booleans(),
)
def test_with_overlap_no_round_is_faster_than_its_bound(
    drawn: tuple[Plan, Profile, Cluster], overheads: Overheads, ahead: bool
) -> None:
    plan, profile, cluster = drawn
    cluster = with_overheads(cluster, overheads)
    cost = CostModel(profile, cluster, overlap=True, updates_ahead=ahead)
    simulation = simulate(plan, profile, cluster, overlap=True, updates_ahead=ahead)
    assert lower_bound(cost, draft_of(plan, cost)) <= simulation.round_seconds * (1 + 1e-9)
    assert all(
        busy <= simulation.round_seconds * (1 + 1e-9) for busy in simulation.busy_seconds.values()
    )


@settings(max_examples=examples_of(13), deadline=None, derandomize=True)
@given(split_rounds())
def test_a_stage_obeys_the_rule_that_the_runtime_follows(
    case: tuple[Plan, Profile, Cluster],
) -> None:
    """Asked the same questions, `ZeroBubble` gives the simulated order."""
    plan, profile, cluster = case
    simulation = simulate(plan, profile, cluster)
    names = [device.name for stage in plan.stages for device in stage.devices]
    for p, stage in enumerate(plan.stages):
        if stage.held is None or len(stage.devices) > 1 or names.count(stage.devices[0].name) > 1:
            continue
        actions = line(simulation, p)
        rule = ZeroBubble(one_f_one_b(plan.micro_batches, stage.warmup), stage.held)
        for i, action in enumerate(actions):
            following = next((a for a in actions[i:] if a.kind != "weight"), None)
            chosen = rule.next(partial(eq, action))
            if following is None:
                assert chosen is None
                assert ScheduleAction("weight", rule.pending.popleft()) == action
            else:
                assert chosen == action
        assert not rule.pending


def test_without_weight_times_a_split_backward_changes_nothing() -> None:
    plan = planning_examples.straight_plan(BatchSplit(6, 1), ("a", (0, 1), 3), ("b", (1, 2), 1))
    profile = planning_examples.profile([(1.0, 2.0), (1.0, 2.0)])
    cluster = planning_examples.cluster("a", "b")
    split = simulate(held_plan(plan, [None, 3]), profile, cluster)
    assert split.round_seconds == simulate(plan, profile, cluster).round_seconds


def test_splitting_takes_the_way_back_out_of_the_bubble() -> None:
    """Section 2.3: (P-1)(F+B+W) are waited for in 1F1B; with as much memory as its stage 0 needs,
    P-1 forwards at the start are what remains."""
    count, names = 12, "abcd"
    profile = weighed(planning_examples.profile([(1.0, 2.0)] * 4), [8] * 4)

    def bubble(held: Sequence[int | None]) -> float:
        depths = (7, 5, 3, 1)
        places = [(name, (p, p + 1), depths[p]) for p, name in enumerate(names)]
        plan = held_plan(planning_examples.straight_plan(BatchSplit(count, 1), *places), held)
        simulation = simulate(plan, profile, planning_examples.cluster(*names))
        return simulation.round_seconds - 3.0 * count

    assert bubble((None,) * 4) == 3 * 3
    assert bubble((None, 7, 7, 7)) == 3 * 1


def test_memory_counts_what_a_stage_may_hold() -> None:
    profile = planning_examples.profile([(1.0, 1.0)] * 2, parameter_bytes=10, activation_bytes=7)
    plan = planning_examples.straight_plan(BatchSplit(4, 1), ("a", (0, 1), 3), ("b", (1, 2), 1))
    simulation = simulate(held_plan(plan, [None, 2]), profile, planning_examples.cluster("a", "b"))
    assert simulation.peak_bytes == {"a": 10 * 3 + 3 * 7, "b": 10 * 3 + 2 * 7}


def test_splitting_costs_a_little_of_every_backward() -> None:
    profile = weighed(planning_examples.profile([(1.0, 2.0)]), [4])
    plan = planning_examples.straight_plan(BatchSplit(2, 1), ("a", (0, 1), 1))
    cluster = with_overheads(planning_examples.cluster("a"), NOTHING)
    split = simulate(held_plan(plan, [2]), profile, cluster, overlap=True)
    assert split.round_seconds == pytest.approx(2 * (1.0 + SPLIT_FACTOR * 2.0))
    assert simulate(plan, profile, cluster, overlap=True).round_seconds == 6.0


def test_deferred_weight_gradients_hide_an_all_reduce() -> None:
    """Last units first: unit 1's sums travel while unit 0's weight gradients are made."""
    profile = weighed(planning_examples.profile([(1.0, 10.0), (1.0, 10.0)]), [8, 8])
    units = profile.units[0], replace(profile.units[1], parameter_bytes=MIN_BYTES)
    profile = replace(profile, units=units)
    link = replace(planning_examples.FREE, bytes_per_s=MIN_BYTES / 5)
    cluster = with_overheads(planning_examples.cluster("a", "b", link=link), NOTHING)
    simulation = simulate(
        held_plan(shared_plan("a", "b", units=2), [1]), profile, cluster, overlap=True
    )
    c = SPLIT_FACTOR
    # Forward until 2, inputs' part 10c, weights of unit 1 5c, of unit 0 5c; the sums take 5.
    (start, end), _ = [
        (e.start_seconds, e.end_seconds) for e in simulation.timeline if e.kind == "all-reduce"
    ]
    assert (start, end) == pytest.approx((2 + 15 * c, 2 + 15 * c + 5))
    assert simulation.round_seconds == pytest.approx(2 + 20 * c)
