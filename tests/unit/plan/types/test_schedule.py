from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import OptionError
from p2ptrain.plan.simulation.simulate import Simulation, simulate
from p2ptrain.plan.types import schedule
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.schedule import Kind, ScheduleAction, ZeroBubble, one_f_one_b, usual_warmup
from p2ptrain.plan.types.unit_times import TimeTable
from tests.support import planning_examples
from tests.support.schedule_deadlock import find_deadlock

PICTURE = """
    stage 0   F0 F1 F2 F3 .  B0 .  B1 .  B2 .  B3
    stage 1   .  F0 F1 F2 B0 F3 B1 .  B2 .  B3 .
    stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
"""


SPLIT_PICTURE = """
    stage 0   F0 F1 F2 F3 .  B0 B0 .  B1 B1 B2 B2 B3 B3
    stage 1   .  F0 F1 F2 B0 F3 W0 B1 W1 B2 W2 B3 W3 .
    stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3
"""
THREE_STAGES = (("a", (0, 1), 4), ("b", (1, 2), 3), ("c", (2, 3), 1))


def drawn(simulation: Simulation, stages: int) -> str:
    """A line a stage, what it does in every tick."""
    ticks = [["."] * round(simulation.round_seconds) for _ in range(stages)]
    for entry in simulation.timeline:
        kinds: Sequence[Kind] = ("forward", "backward", "weight")
        for kind in kinds:
            if entry.kind == kind and entry.micro_batch is not None:
                for tick in range(round(entry.start_seconds), round(entry.end_seconds)):
                    ticks[entry.stage][tick] = str(ScheduleAction(kind, entry.micro_batch))
    return "\n".join(
        f"    stage {p}   {' '.join(f'{tick:2}' for tick in line)}".rstrip()
        for p, line in enumerate(ticks)
    )


def test_the_picture_is_what_three_stages_do() -> None:
    plan = planning_examples.straight_plan(BatchSplit(4, 1), *THREE_STAGES)
    profile = planning_examples.profile([(1.0, 1.0)] * 3, output_bytes=0)
    simulation = simulate(plan, profile, planning_examples.cluster("a", "b", "c"))
    assert drawn(simulation, 3) == PICTURE.strip("\n")
    assert PICTURE in (schedule.__doc__ or "")


def test_the_picture_of_split_backwards_is_what_three_stages_do() -> None:
    plan = planning_examples.straight_plan(BatchSplit(4, 1), *THREE_STAGES)
    profile = planning_examples.profile([(1.0, 2.0)] * 3, output_bytes=0)
    times = replace(profile.times.times[0], weight=(1.0,) * 3)
    profile = replace(profile, times=TimeTable((1,), (times,)))
    cluster = planning_examples.cluster("a", "b", "c")
    assert simulate(plan, profile, cluster).round_seconds == 18
    stages = tuple(
        replace(stage, held=held) for stage, held in zip(plan.stages, (None, 4, 4), strict=True)
    )
    simulation = simulate(replace(plan, stages=stages), profile, cluster)
    assert drawn(simulation, 3) == SPLIT_PICTURE.strip("\n")
    assert SPLIT_PICTURE.rstrip("\n") in (schedule.__doc__ or "")


@given(st.integers(1, 12), st.data())
def test_split_backwards_keep_the_strict_order_and_what_may_be_held(
    count: int, data: st.DataObject
) -> None:
    """Whatever arrives when: every task once, and W as early as waiting allows."""
    warmup = data.draw(st.integers(1, count))
    held = data.draw(st.integers(warmup, count))
    rule, done = ZeroBubble(one_f_one_b(count, warmup), held), list[ScheduleAction]()
    while (action := rule.next(lambda _: data.draw(st.booleans()))) is not None:
        done.append(action)
        if action.kind == "forward":
            weighed = sum(one.kind == "weight" for one in done)
            assert action.micro_batch - weighed < held
        if action.kind == "weight":
            assert ScheduleAction("backward", action.micro_batch) in done
    done += [ScheduleAction("weight", m) for m in rule.pending]
    assert [one for one in done if one.kind != "weight"] == list(one_f_one_b(count, warmup))
    assert [one.micro_batch for one in done if one.kind == "weight"] == list(range(count))


def test_where_nothing_is_waited_for_weight_gradients_are_put_off_as_long_as_allowed() -> None:
    rule = ZeroBubble(one_f_one_b(4, 1), 2)
    done = iter(lambda: rule.next(lambda _: True), None)
    assert " ".join(map(str, done)) == "F0 B0 F1 B1 W0 F2 B2 W1 F3 B3"
    assert list(rule.pending) == [2, 3]


def test_orders_of_the_picture() -> None:
    assert " ".join(map(str, one_f_one_b(4, 3))) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert " ".join(map(str, one_f_one_b(4, 4))) == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert " ".join(map(str, one_f_one_b(4, 1))) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_usual_depths_are_odd_and_cut_to_the_round() -> None:
    assert usual_warmup(4, 100) == (7, 5, 3, 1)
    assert usual_warmup(4, 4) == (4, 4, 3, 1)


@pytest.mark.parametrize("warmup", [0, 5])
def test_a_depth_outside_the_round_is_refused(warmup: int) -> None:
    with pytest.raises(OptionError, match="between 1 and 4"):
        one_f_one_b(4, warmup)


@given(st.integers(1, 40), st.data())
def test_every_task_once_and_never_more_than_warmup_in_flight(
    count: int, data: st.DataObject
) -> None:
    warmup = data.draw(st.integers(1, count))
    order = one_f_one_b(count, warmup)
    assert len(set(order)) == len(order) == 2 * count
    in_flight, peak = 0, 0
    for action in order:
        in_flight += 1 if action.kind == "forward" else -1
        peak = max(peak, in_flight)
        assert in_flight >= 0
    assert peak == warmup
    for kind in ("forward", "backward"):
        assert [a.micro_batch for a in order if a.kind == kind] == list(range(count))


@given(st.integers(1, 12), st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_depths_that_never_grow_never_deadlock(count: int, depths: list[int]) -> None:
    cut = [min(depth, count) for depth in depths]
    orders = [one_f_one_b(count, depth) for depth in cut]
    stuck = find_deadlock(orders)
    grows = any(later > earlier for earlier, later in pairwise(cut))
    assert bool(stuck) == grows


def test_a_deadlock_names_who_waits_for_what() -> None:
    stuck = find_deadlock([one_f_one_b(3, 1), one_f_one_b(3, 2)])
    assert [(s.stage, str(s.action)) for s in stuck] == [(0, "B0"), (1, "F1")]
