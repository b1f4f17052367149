from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import OptionError
from p2ptrain.plan import schedule
from p2ptrain.plan.schedule import Action, find_deadlock, forward_only, one_f_one_b, usual_warmup
from p2ptrain.plan.simulation.simulate import simulate
from p2ptrain.plan.split import BatchSplit
from tests.unit.plan import examples

PICTURE = """
    stage 0   F0 F1 F2 F3 .  B0 .  B1 .  B2 .  B3
    stage 1   .  F0 F1 F2 B0 F3 B1 .  B2 .  B3 .
    stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
"""


def test_the_picture_is_what_three_stages_do() -> None:
    plan = examples.straight_plan(
        BatchSplit(4, 1), ("a", (0, 1), 4), ("b", (1, 2), 3), ("c", (2, 3), 1)
    )
    profile = examples.profile([(1.0, 1.0)] * 3, output_bytes=0)
    simulation = simulate(plan, profile, examples.cluster("a", "b", "c"))
    ticks = [["."] * round(simulation.round_seconds) for _ in plan.stages]
    for entry in simulation.timeline:
        if entry.kind in ("forward", "backward") and entry.micro_batch is not None:
            action = Action("forward" if entry.kind == "forward" else "backward", entry.micro_batch)
            ticks[entry.stage][round(entry.start_seconds)] = str(action)
    lines = [
        f"    stage {p}   {' '.join(f'{tick:2}' for tick in line)}".rstrip()
        for p, line in enumerate(ticks)
    ]
    assert "\n".join(lines) == PICTURE.strip("\n")
    assert PICTURE in (schedule.__doc__ or "")


def test_orders_of_the_picture() -> None:
    assert " ".join(map(str, one_f_one_b(4, 3))) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert " ".join(map(str, one_f_one_b(4, 4))) == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert " ".join(map(str, one_f_one_b(4, 1))) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert " ".join(map(str, forward_only(3))) == "F0 F1 F2"


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
