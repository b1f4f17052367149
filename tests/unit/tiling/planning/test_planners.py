from __future__ import annotations

import json
import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import OptionError, PlanError
from p2ptrain.plan.cost.check_plan import check_plan
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.simulation.simulate import simulate
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.plan import Plan, PlannedStage
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from p2ptrain.plan.types.weight_versions import depths_of
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples
from tests.support.exhaustive_planner import best_round_seconds
from tests.support.planning_examples import quick_request
from tests.support.planning_questions import sound_plan, tried
from tests.support.thorough import examples_of

FAST = ClusterLink(1e9, 0.0)
EIGHT = planning_examples.profile([(1.0, 1.0)] * 8, parameter_bytes=10, activation_bytes=5)


def placed(plan: Plan) -> list[tuple[str, tuple[int, int]]]:
    return [(stage.devices[0].name, stage.units) for stage in plan.stages]


def devices(**slowdowns: float) -> tuple[ClusterDevice, ...]:
    first = next(iter(slowdowns))
    return tuple(
        ClusterDevice(name, planning_examples.PLENTY, slowdown, holder=name == first)
        for name, slowdown in slowdowns.items()
    )


def test_a_faster_device_gets_more_units() -> None:
    cluster = Cluster(devices(laptop=1.0, pi=3.0), FAST)
    plan = make_plan(EIGHT, cluster, quick_request(64, 1, groups=False))
    assert sorted(placed(plan)) == [("laptop", (0, 6)), ("pi", (6, 8))]
    assert plan.found_by in ("search", "pp")
    assert plan.left_out == ()
    assert plan.predicted.round_seconds < 64 * 16 * 0.8


def test_own_times_replace_the_profile_and_the_slowdown() -> None:
    own = TimeTable((1,), (UnitTimes((1.0,) * 8, (1.0,) * 8),))
    pi = ClusterDevice("pi", planning_examples.PLENTY, slowdown=100.0, times=own)
    plan = make_plan(
        EIGHT,
        Cluster((*devices(laptop=1.0), pi), FAST),
        quick_request(64, 1, groups=False),
    )
    assert sorted(units for _, units in placed(plan)) == [(0, 4), (4, 8)]


def test_a_slow_link_leaves_a_device_out_and_says_so() -> None:
    profile = planning_examples.profile(
        [(1.0, 1.0)] * 8, output_bytes=1_000_000, parameter_bytes=100_000, input_bytes=1_000_000
    )
    cluster = Cluster(
        devices(laptop=1.0, nas=1.0, phone=1.0),
        ClusterLink(1e9, 0.0),
        {("laptop", "phone"): ClusterLink(1e4, 0.0), ("nas", "phone"): ClusterLink(1e4, 0.0)},
    )
    plan = make_plan(profile, cluster, quick_request(32, 1))
    used = {device.name for stage in plan.stages for device in stage.devices}
    assert used == {"laptop", "nas"}
    (out,) = plan.left_out
    assert out.name == "phone"
    assert out.reason.startswith("with it a step would take ")
    assert out.reason.endswith("its network carries only 10 kB/s")


def test_a_slow_device_is_left_out_for_its_speed() -> None:
    cluster = Cluster(devices(laptop=1.0, watch=400.0), FAST)
    plan = make_plan(EIGHT, cluster, quick_request(8, 1))
    assert plan.found_by == "single"
    assert "it computes 400.0 times slower than laptop" in plan.left_out[0].reason


@pytest.mark.parametrize(
    ("request_", "units", "reason"),
    [
        (
            quick_request(8, 1, private=True),
            2,
            "--private keeps the first and the last layers on laptop, and there are none between",
        ),
        (
            quick_request(8, 1, caps={"pi": 0.01}),
            1,
            "every plan found with it needs more memory than a device in it has, or breaks a --cap",
        ),
    ],
)
def test_who_cannot_have_a_part_does_not_hear_that_memory_lacks(
    request_: PlanRequest, units: int, reason: str
) -> None:
    cluster = Cluster(devices(laptop=1.0, pi=1.0), FAST)
    plan = make_plan(planning_examples.profile([(1.0, 1.0)] * units), cluster, request_)
    assert [(out.name, out.reason) for out in plan.left_out] == [("pi", reason)]


def test_a_device_too_small_for_any_unit_is_left_out_for_its_memory() -> None:
    watch = ClusterDevice("watch", 30, 1.0)
    plan = make_plan(EIGHT, Cluster((*devices(laptop=1.0), watch), FAST), quick_request(8, 1))
    assert plan.left_out[0].reason == (
        "its memory for layers, 30 bytes, holds none: the smallest needs 35 bytes"
    )


def test_memory_forces_a_pipeline_and_lowers_the_depth() -> None:
    # 8 units of 30 bytes of state and 5 a sample: 280 bytes in all for one sample.
    cluster = planning_examples.cluster("a", "b", link=ClusterLink(1.0, 0.0), memory_bytes=150)
    plan = make_plan(EIGHT, cluster, quick_request(16, 1))
    assert [stage.warmup for stage in plan.stages] == [1, 1]
    assert max(plan.predicted.peak_bytes.values()) <= 150


def test_pp_uses_every_device_however_slow() -> None:
    cluster = Cluster(devices(laptop=1.0, nas=1.0, pi=2.0), ClusterLink(1.0, 1.0))
    ten = planning_examples.profile([(1.0, 1.0)] * 10)
    plan = make_plan(ten, cluster, quick_request(16, 4, "pp"))
    assert placed(plan) == [("laptop", (0, 4)), ("nas", (4, 8)), ("pi", (8, 10))]
    assert (
        plan.predicted.round_seconds
        > make_plan(ten, cluster, quick_request(16, 4)).predicted.round_seconds
    )
    assert plan.found_by is None
    assert plan.left_out == ()


def test_single_takes_the_fastest_that_fits_and_explains_the_others() -> None:
    big = ClusterDevice("big", 10**6, 2.0, holder=True)
    small, slow = ClusterDevice("small", 100, 1.0), ClusterDevice("slow", 10**6, 5.0)
    cluster = Cluster((big, small, slow), FAST)
    plan = make_plan(EIGHT, cluster, quick_request(4, 4, "single"))
    assert placed(plan) == [("big", (0, 8))]
    reasons = {out.name: out.reason for out in plan.left_out}
    assert reasons["small"] == "the whole model needs 400 bytes, this device has 100 bytes"
    assert reasons["slow"].startswith("planner single uses one device: 320 s a step here")


def test_of_equally_fast_plans_that_of_least_memory_is_taken() -> None:
    """Of a model of one unit every size and every depth takes equally long."""
    model = planning_examples.profile([(0.009, 0.017)], parameter_bytes=10, activation_bytes=500)
    cluster = Cluster(devices(laptop=1.0, pi=3.3), FAST)
    for planner in ("auto", "single"):
        plan = make_plan(model, cluster, quick_request(512, None, planner, private=True))
        assert plan.split.micro_batch == 1
        assert [stage.warmup for stage in plan.stages] == [1]


def test_private_keeps_both_ends_on_the_holder() -> None:
    cluster = Cluster(devices(laptop=1.0, nas=1.0), FAST)
    plan = make_plan(EIGHT, cluster, quick_request(64, 1, private=True))
    assert [name for name, _ in placed(plan)] == ["laptop", "nas", "laptop"]
    check_plan(plan, EIGHT, cluster, private=True)
    alone = make_plan(EIGHT, cluster, quick_request(64, 1, "single", private=True))
    assert placed(alone) == [("laptop", (0, 8))]
    pp = make_plan(EIGHT, cluster, quick_request(64, 1, "pp", private=True))
    assert sum(end - first for name, (first, end) in placed(pp) if name == "laptop") == 4


@pytest.mark.parametrize("seed", [3, 9, 12])
def test_asynchronously_a_depth_is_the_number_of_stages_behind_it(seed: int) -> None:
    """Whatever would be faster: it is how many updates old the weights are."""
    profile, cluster = planning_examples.household(seed, 6, 3)
    dealing = frozenset({Allocation.MICRO_BATCHES})
    request = quick_request(
        16, private=True, mode=PlanMode.ASYNC, allocations=dealing, overlap=False
    )
    stages = make_plan(profile, cluster, request).stages
    assert tuple(s.warmup for s in stages) == depths_of([len(s.devices) for s in stages])


@pytest.mark.parametrize("seed", [15, 36, 40, 50, 67])
def test_where_depths_are_to_be_full_others_are_no_plan(seed: int) -> None:
    """The fastest plan has a lowered depth; there is one that needs none."""
    profile, cluster = planning_examples.tight_household(seed, 5, 3)
    request = quick_request(8, mode=PlanMode.ASYNC, groups=False)
    free, full = (
        make_plan(profile, cluster, replace(request, full_depths=wanted))
        for wanted in (False, True)
    )
    usual = [depths_of([1] * len(plan.stages)) for plan in (free, full)]
    assert tuple(stage.warmup for stage in free.stages) != usual[0]
    assert tuple(stage.warmup for stage in full.stages) == usual[1]
    assert full.predicted.round_seconds >= free.predicted.round_seconds


def test_only_the_devices_asked_for_are_used() -> None:
    cluster = Cluster(devices(laptop=1.0, nas=1.0), FAST)
    plan = make_plan(EIGHT, cluster, quick_request(64, 1, only=frozenset({"laptop"})))
    assert placed(plan) == [("laptop", (0, 8))]
    assert plan.left_out[0].reason == "--exclude or --require forbid it"


def test_a_micro_batch_larger_than_the_batch_is_the_batch() -> None:
    plan = make_plan(EIGHT, planning_examples.cluster("a"), quick_request(6, 16))
    assert (plan.micro_batch, plan.micro_batches, plan.stages[0].devices[0].share) == (6, 1, 6)


def test_ends_that_fit_the_holder_only_one_by_one_are_not_the_only_ones_tried() -> None:
    """Most equal is [0, 1) and [2, 4) on a: 90 bytes. [0, 1) and [3, 4) take 60."""
    model = planning_examples.profile([(2, 2), (4, 4), (1, 1), (1, 1)], parameter_bytes=10)
    plenty = planning_examples.cluster("a", "b")
    assert [stage.units for stage in _private_pp(model, plenty)] == [(0, 1), (1, 2), (2, 4)]
    tight = replace(
        plenty, devices=(replace(plenty.devices[0], memory_bytes=70), plenty.devices[1])
    )
    assert [stage.units for stage in _private_pp(model, tight)] == [(0, 1), (1, 3), (3, 4)]


def _private_pp(model: Profile, cluster: Cluster) -> tuple[PlannedStage, ...]:
    return make_plan(model, cluster, quick_request(4, 1, "pp", private=True)).stages


@pytest.mark.parametrize("planner", ["auto", "pp", "single"])
def test_a_model_larger_than_all_memory_says_how_much(planner: str) -> None:
    cluster = planning_examples.cluster("a", "b", memory_bytes=100)
    with pytest.raises(PlanError) as caught:
        make_plan(EIGHT, cluster, quick_request(16, 2, planner))
    # 8 units of 3 x 10 bytes and 2 samples x 5 bytes.
    offered = 100 if planner == "single" else 200
    assert "the model needs 320 bytes" in str(caught.value)
    assert f" {offered} bytes: " in str(caught.value)
    assert f"{320 - offered} bytes missing" in str(caught.value)


def test_a_unit_larger_than_any_device_is_named() -> None:
    units = (replace(EIGHT.units[0], name="head", parameter_bytes=100), *EIGHT.units[1:])
    cluster = planning_examples.cluster("a", "b", "c", memory_bytes=290)
    with pytest.raises(PlanError) as caught:
        make_plan(replace(EIGHT, units=units), cluster, quick_request(16, 1))
    assert 'layer "head" needs 305 bytes' in str(caught.value)
    assert "15 bytes missing" in str(caught.value)


def test_private_ends_that_do_not_fit_are_named() -> None:
    small = ClusterDevice("a", 40, holder=True)
    cluster = Cluster((small, ClusterDevice("b", 10**6)), FAST)
    with pytest.raises(PlanError, match=r"--private a keeps .*need 70 bytes, and it has 40"):
        make_plan(EIGHT, cluster, quick_request(16, 1, private=True))


def test_a_private_unit_alone_that_does_not_fit_is_named_once() -> None:
    small = ClusterDevice("a", 30, holder=True)
    model = planning_examples.profile([(1.0, 1.0)], parameter_bytes=10, activation_bytes=5)
    cluster = Cluster((small, ClusterDevice("b", 10**6)), FAST)
    with pytest.raises(PlanError, match=r'a keeps all layers \("unit0"\), which need 35 bytes'):
        make_plan(model, cluster, quick_request(16, 1, private=True))


def test_pp_with_more_devices_than_units_is_refused() -> None:
    with pytest.raises(PlanError, match="1 layers for 2 parts"):
        make_plan(
            planning_examples.profile([(1, 1)]),
            planning_examples.cluster("a", "b"),
            quick_request(4, 1, "pp"),
        )


def test_wrong_requests_are_refused() -> None:
    cluster = planning_examples.cluster("a")
    with pytest.raises(
        OptionError, match=r'unknown planner "best" \(known: auto, dp, ftpipehd, .*single, tiles\)'
    ):
        make_plan(EIGHT, cluster, quick_request(4, 1, "best"))
    with pytest.raises(OptionError, match="batch_size must be at least 1"):
        make_plan(EIGHT, cluster, quick_request(0))
    with pytest.raises(OptionError, match='no device "z"'):
        make_plan(EIGHT, cluster, quick_request(4, 1, only=frozenset({"z"})))
    other = ClusterDevice("a", 1, holder=True, times=planning_examples.table([1.0], [1.0]))
    with pytest.raises(OptionError, match='device "a" are of 1 units, the profile has 8'):
        make_plan(EIGHT, Cluster((other,), FAST), quick_request(4))


REQUESTS = st.builds(
    quick_request,
    batch_size=st.sampled_from([1, 5, 16]),
    micro_batch=st.sampled_from([None, 1, 4]),
    private=st.booleans(),
)


@settings(max_examples=examples_of(5), deadline=None, derandomize=True)
@given(
    planning_examples.profiles(), planning_examples.clusters(most_devices=4), REQUESTS, st.randoms()
)
def test_plans_are_sound(
    profile: Profile, cluster: Cluster, request: PlanRequest, random: Random
) -> None:
    """Units covered, memory kept, JSON exact, listing order irrelevant, prediction reproducible."""
    plan = sound_plan(profile, cluster, request, random)
    if plan is None:
        return
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert simulate(plan, profile, cluster).round_seconds == plan.predicted.round_seconds


@settings(max_examples=examples_of(5), deadline=None, derandomize=True)
@given(
    planning_examples.profiles(),
    planning_examples.clusters(),
    st.sampled_from([1, 5, 16]),
    st.sampled_from([1, 4]),
    st.booleans(),
)
def test_auto_is_within_two_per_cent_of_every_straight_pipeline(
    profile: Profile, cluster: Cluster, batch_size: int, micro_batch: int, private: bool
) -> None:
    request = quick_request(batch_size, micro_batch, private=private)
    split = BatchSplit(batch_size, min(micro_batch, batch_size))
    cost = CostModel(profile, cluster)
    best, _ = best_round_seconds(cost, split, private=private, groups=False)
    plan = tried(profile, cluster, request)
    assert (plan is None) == math.isinf(best)
    if plan is not None:
        assert plan.predicted.round_seconds <= best * 1.02
