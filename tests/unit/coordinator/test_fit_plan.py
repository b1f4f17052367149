"""A plan of the user's, held against the household as it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from p2ptrain.coordinator.plan_question import NOT_IN_PLAN, fit_plan
from p2ptrain.errors import OptionError, PlanError
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.messages.plan_request import SharingLimits
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.plan.types.plan import DeviceShare, LeftOut, Plan, PlannedStage, Predicted
from p2ptrain.plan.types.request import PlanMode
from tests.unit.coordinator.test_plan_cluster import household
from tests.unit.holder.planning.test_planner_client import REQUEST as SETTLED

REQUEST = replace(SETTLED, micro_batch=0)
UNITS = 4
HOME = household(1.0, 1.0, 2.0)
SIZE = 4
COUNT = -(-REQUEST.batch_size // SIZE)


def plan(
    *stages: tuple[int, int, Sequence[str]],
    left_out: Sequence[LeftOut] = (),
    allocation: Allocation = Allocation.SAMPLES,
) -> Plan:
    """Stages as (first, end, devices), which share evenly."""
    whole = SIZE if allocation is Allocation.SAMPLES else COUNT

    def shares(devices: Sequence[str]) -> tuple[DeviceShare, ...]:
        part, rest = divmod(whole, len(devices))
        return tuple(DeviceShare(name, part + (k < rest)) for k, name in enumerate(devices))

    return Plan(
        planner="by hand",
        split=BatchSplit(REQUEST.batch_size, SIZE),
        stages=tuple(
            PlannedStage(
                (first, end),
                shares(devices),
                len(stages) - p,
                allocation if len(devices) > 1 else Allocation.SAMPLES,
            )
            for p, (first, end, devices) in enumerate(stages)
        ),
        predicted=Predicted(1e9, 1e-9, {}),
        left_out=tuple(left_out),
    )


STRAIGHT = plan((0, 2, ["device-0"]), (2, UNITS, ["device-2"]))


def test_it_says_what_it_means_for_these_devices() -> None:
    gone = LeftOut("old-phone", "too slow")
    fitted = fit_plan(replace(STRAIGHT, left_out=(gone,)), REQUEST, HOME)
    assert [stage.devices for stage in fitted.stages] == [s.devices for s in STRAIGHT.stages]
    assert [stage.warmup for stage in fitted.stages] == [2, 1]
    assert fitted.left_out == (LeftOut("device-1", NOT_IN_PLAN),)
    assert fitted.predicted.round_seconds < 1e3
    assert fitted.predicted.peak_bytes.keys() == {"device-0", "device-2"}
    assert fitted.planner == "auto"


def test_its_own_reason_for_leaving_a_device_out_stays() -> None:
    out = LeftOut("device-1", "it is for games")
    assert fit_plan(replace(STRAIGHT, left_out=(out,)), REQUEST, HOME).left_out == (out,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            plan((0, 2, ["device-0"]), (2, UNITS, ["tv"])),
            'uses "tv", which is not among the devices here: device-0, device-1, device-2',
        ),
        (
            plan((0, 2, ["device-0"]), (2, UNITS + 1, ["device-1"])),
            "for a model of 5 layers, and this one has 4",
        ),
        (plan((0, 3, ["device-0"])), "for a model of 3 layers"),
        (
            replace(STRAIGHT, split=BatchSplit(2 * REQUEST.batch_size, SIZE)),
            "16 micro-batches of 4 samples, and a batch of this job, 32, is 8 of them",
        ),
        (
            replace(
                STRAIGHT,
                mode=PlanMode.ASYNC,
                split=BatchSplit(2 * REQUEST.batch_size, REQUEST.batch_size),
                stages=tuple(
                    replace(
                        stage, devices=(DeviceShare(stage.devices[0].name, REQUEST.batch_size),)
                    )
                    for stage in STRAIGHT.stages
                ),
            ),
            "the plan is for --mode async",
        ),
    ],
)
def test_what_is_no_plan_of_this_job_is_refused_in_words(given: Plan, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        fit_plan(given, REQUEST, HOME)


def test_a_device_that_could_not_be_measured_is_named_with_the_reason() -> None:
    given = plan((0, 2, ["device-0"]), (2, UNITS, ["tv"]))
    out = LeftOut("tv", "it did not answer")
    with pytest.raises(OptionError, match=r"device-2 \(it did not answer\)"):
        fit_plan(given, REQUEST, HOME, [out])


def test_other_micro_batches_than_the_job_s_are_refused() -> None:
    with pytest.raises(OptionError, match="micro-batches of 4 samples, and this job of 8"):
        fit_plan(STRAIGHT, replace(REQUEST, micro_batch=8), HOME)
    assert fit_plan(STRAIGHT, replace(REQUEST, micro_batch=4), HOME).micro_batch == 4


def test_too_little_memory_is_refused_with_what_is_missing() -> None:
    small = [
        replace(c, memory=MemoryBudgets(20_000)) if c.name == "device-2" else c
        for c in HOME.candidates
    ]
    with pytest.raises(PlanError, match=r"needs .* on device-2, which has 20.*: .* missing"):
        fit_plan(STRAIGHT, REQUEST, replace(HOME, candidates=small))


def test_a_group_is_refused_where_the_model_allows_none() -> None:
    shared = plan((0, UNITS, ["device-0", "device-1"]))
    assert len(fit_plan(shared, REQUEST, HOME).stages[0].devices) == 2
    alone = replace(REQUEST, sharing=SharingLimits(unshared="running statistics"))
    with pytest.raises(OptionError, match=r"stage 0 to 2 devices.*\(running statistics\)"):
        fit_plan(shared, alone, HOME)
    dealt = plan((0, UNITS, ["device-0", "device-1"]), allocation=Allocation.MICRO_BATCHES)
    whole = replace(REQUEST, sharing=SharingLimits(divisible=False))
    assert fit_plan(dealt, whole, HOME).stages[0].allocation is Allocation.MICRO_BATCHES
    with pytest.raises(OptionError, match='by samples, which this model does not allow: "alloc'):
        fit_plan(shared, whole, HOME)


def test_private_ends_stay_with_the_data() -> None:
    private = replace(REQUEST, private_first=1, private_last=1)
    ends = plan((0, 1, ["device-0"]), (1, 3, ["device-1"]), (3, UNITS, ["device-0"]))
    assert len(fit_plan(ends, private, HOME).stages) == 3
    with pytest.raises(OptionError, match="the first 1 layers and the last 1 stay on device-0"):
        fit_plan(STRAIGHT, private, HOME)


def test_asynchronously_devices_take_turns() -> None:
    size = REQUEST.batch_size
    async_request = replace(REQUEST, asynchrony=AsyncOptions())
    given = Plan(
        planner="auto",
        split=BatchSplit(2 * size, size),
        stages=(
            PlannedStage((0, 2), (DeviceShare("device-0", size),), 2),
            PlannedStage((2, UNITS), (DeviceShare("device-1", size),), 1),
        ),
        predicted=Predicted(1.0, 1.0, {}),
        mode=PlanMode.ASYNC,
    )
    assert fit_plan(given, async_request, HOME).mode is PlanMode.ASYNC
    two = (DeviceShare("device-0", size - 1), DeviceShare("device-2", 1))
    shared = replace(given, stages=(replace(given.stages[0], devices=two), given.stages[1]))
    with pytest.raises(OptionError, match="with --mode async they take turns"):
        fit_plan(shared, async_request, HOME)
