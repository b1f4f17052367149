from __future__ import annotations

import pytest

from p2ptrain.errors import PlanError
from p2ptrain.plan.types.allocation import Allocation
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples

EIGHT = planning_examples.profile([(1.0, 1.0)] * 8, parameter_bytes=10, activation_bytes=5)
FAST = ClusterLink(1e9, 0.0)
STATE = 8 * 10 * 3
"""Bytes of parameters, gradients and optimizer of EIGHT; a sample adds 40."""


def household(*devices: tuple[str, float, int]) -> Cluster:
    """Devices as (name, slowdown, memory); the first one is the holder."""
    return Cluster(
        tuple(
            ClusterDevice(name, memory, slowdown, holder=name == devices[0][0])
            for name, slowdown, memory in devices
        ),
        FAST,
    )


def test_samples_are_divided_by_speed() -> None:
    cluster = household(("laptop", 1.0, 10**6), ("pi", 3.0, 10**6))
    plan = make_plan(EIGHT, cluster, PlanRequest(8, 8, "dp"))
    (stage,) = plan.stages
    assert stage.units == (0, 8)
    assert [(device.name, device.share) for device in stage.devices] == [("laptop", 6), ("pi", 2)]
    assert plan.left_out == ()


def test_memory_limits_a_share() -> None:
    cluster = household(("laptop", 1.0, STATE + 4 * 40 + 39), ("pi", 3.0, 10**6))
    plan = make_plan(EIGHT, cluster, PlanRequest(8, 8, "dp"))
    assert [device.share for device in plan.stages[0].devices] == [4, 4]


def test_a_micro_batch_of_one_sample_is_dealt_whole() -> None:
    cluster = household(("laptop", 1.0, 10**6), ("pi", 3.0, 10**6))
    plan = make_plan(EIGHT, cluster, PlanRequest(8, 1, "dp"))
    (stage,) = plan.stages
    assert stage.allocation is Allocation.MICRO_BATCHES
    assert [device.share for device in stage.devices] == [6, 2]


def test_a_further_micro_batch_goes_to_the_one_that_has_it_done_first() -> None:
    """The laptop's fifth ends after 4, the pi's second after 6 micro-batches' time."""
    cluster = household(("laptop", 1.0, 10**6), ("pi", 3.0, 10**6))
    plan = make_plan(EIGHT, cluster, PlanRequest(5, 1, "dp"))
    assert [device.share for device in plan.stages[0].devices] == [4, 1]


def test_a_device_too_small_for_the_model_is_named_with_what_is_missing() -> None:
    cluster = household(("laptop", 1.0, 10**6), ("watch", 1.0, STATE + 30))
    with pytest.raises(PlanError, match=r"280 bytes with one sample, and watch has 270 bytes: 10 "):
        make_plan(EIGHT, cluster, PlanRequest(8, planner="dp"))


def test_too_few_samples_in_memory_are_counted() -> None:
    cluster = household(("laptop", 1.0, STATE + 40), ("pi", 1.0, STATE + 80))
    with pytest.raises(PlanError, match=r"hold 3 samples together, of micro-batches of at least 8"):
        make_plan(EIGHT, cluster, PlanRequest(8, 8, "dp"))


def test_more_devices_than_samples_and_micro_batches_are_refused() -> None:
    cluster = household(*((name, 1.0, 10**6) for name in "abcd"))
    with pytest.raises(PlanError, match="4 devices cannot divide micro-batches of at most 2 sampl"):
        make_plan(EIGHT, cluster, PlanRequest(6, 2, "dp"))


def test_private_data_and_stages_of_one_device_are_refused() -> None:
    cluster = household(("laptop", 1.0, 10**6), ("pi", 3.0, 10**6))
    with pytest.raises(PlanError, match="which --private forbids"):
        make_plan(EIGHT, cluster, PlanRequest(8, planner="dp", private=True))
    with pytest.raises(PlanError, match="planner dp gives layers to several devices"):
        make_plan(EIGHT, cluster, PlanRequest(8, planner="dp", groups=False))


def test_the_holder_alone_needs_no_group() -> None:
    cluster = household(("laptop", 1.0, 10**6))
    plan = make_plan(EIGHT, cluster, PlanRequest(8, 8, "dp", private=True, groups=False))
    assert [device.share for device in plan.stages[0].devices] == [8]


def test_whole_micro_batches_leave_no_device_with_one_more_than_the_others() -> None:
    """60 samples for 5 devices: none of the usual sizes deals evenly, 4 micro-batches each do."""
    cluster = household(*((name, 1.0, 10**6) for name in "abcde"))
    only_dealing = frozenset({Allocation.MICRO_BATCHES})
    request = PlanRequest(60, planner="dp", allocations=only_dealing)
    plan = make_plan(EIGHT, cluster, request)
    shares = {device.share for device in plan.stages[0].devices}
    assert len(shares) == 1
    assert plan.predicted.round_seconds == pytest.approx(60 / 5 * 16, rel=1e-3)
