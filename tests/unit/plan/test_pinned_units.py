"""Folding the ends changes nothing but what may be cut."""

from __future__ import annotations

import pytest

from p2ptrain.plan.pinned_units import PinnedUnits
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.profile import Profile, Unit
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support.planning_examples import quick_request

COUNT = 8
TIMES = TimeTable((4,), (UnitTimes((0.01,) * COUNT, (0.02,) * COUNT),))
PROFILE = Profile(
    model="m",
    input_bytes=100,
    target_bytes=8,
    units=tuple(Unit(f"u{n}", 10 * (n + 1), 100 + n, 50, 7) for n in range(COUNT)),
    optimizer_state_ratio=1.0,
    times=TIMES,
)
CLUSTER = Cluster(
    devices=(
        ClusterDevice("a", 1 << 30, holder=True),
        ClusterDevice("b", 1 << 30, times=TIMES),
        ClusterDevice("c", 1 << 30),
    ),
    default_link=ClusterLink(1e8, 1e-4),
)


@pytest.mark.parametrize(("first", "last"), [(1, 1), (3, 2), (1, 6), (6, 1)])
def test_a_private_plan_keeps_the_folded_ends_on_the_holder(first: int, last: int) -> None:
    fold = PinnedUnits(COUNT, first, last)
    request = quick_request(16, 4, "auto", private=True)
    plan = fold.unfold(make_plan(fold.profile(PROFILE), fold.cluster(CLUSTER), request))
    assert plan.stages[0].units[0] == 0
    assert plan.stages[0].units[1] >= first
    assert plan.stages[-1].units[1] == COUNT
    assert plan.stages[-1].units[0] <= COUNT - last
    assert plan.stages[0].devices[0].name == plan.stages[-1].devices[0].name == "a"


def test_ends_that_meet_are_one_unit_of_the_holder() -> None:
    fold = PinnedUnits(COUNT, COUNT, 0)
    folded = fold.profile(PROFILE)
    assert [unit.name for unit in folded.units] == ["u0..u7"]
    assert folded.times.times[0].backward == (pytest.approx(COUNT * 0.02),)
    plan = make_plan(folded, fold.cluster(CLUSTER), quick_request(16, 4, "auto", private=True))
    (stage,) = fold.unfold(plan).stages
    assert stage.units == (0, COUNT)
    assert [device.name for device in stage.devices] == ["a"]
    nothing_between = (
        "--private keeps the first and the last layers on a, and there are none between"
    )
    assert [out.reason for out in plan.left_out] == [nothing_between] * 2


def test_nothing_is_lost() -> None:
    folded = PinnedUnits(COUNT, 3, 2).profile(PROFILE)
    assert len(folded.units) == 5
    for field in ("parameter_bytes", "activation_bytes", "flops"):
        before = sum(getattr(unit, field) for unit in PROFILE.units)
        assert sum(getattr(unit, field) for unit in folded.units) == before
    assert [unit.output_bytes for unit in folded.units] == [102, 103, 104, 105, 107]
    assert sum(folded.times.times[0].forward) == pytest.approx(COUNT * 0.01)
