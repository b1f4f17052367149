"""A plan that the user gives, held against the household as it was measured. Pure.

What it predicts is computed again: the file may be written by hand, or be of another day.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from p2ptrain.coordinator.measured_cluster import MeasuredCluster, planner_question
from p2ptrain.coordinator.memory_model import with_full_memory
from p2ptrain.coordinator.plan_question import PlanQuestion
from p2ptrain.errors import OptionError, PlanError
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.plan import LeftOut, Plan, Predicted
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.tiling.planning.make_plan import NAMES
from p2ptrain.tiling.planning.tiled_plan import simulate_plan

NOT_IN_PLAN = "the plan given does not use it"


def fit_plan(
    plan: Plan,
    request: JobPlanRequest,
    household: MeasuredCluster,
    unmeasured: Sequence[LeftOut] = (),
) -> Plan:
    """`plan`, with what it means for these devices: speed, memory, and who is not used.

    Args:
        unmeasured: devices that are no candidates, and why.

    Raises:
        OptionError: it is no plan for this job, or of other devices.
        PlanError: a device has too little memory for it.
    """
    request = request.settled(asynchronous=plan.mode is PlanMode.ASYNC)
    why = {out.name: out.reason for out in unmeasured}
    PlanQuestion(request, household).check_fits(plan, why)
    profile, cluster = planner_question(request, household)
    _check_tiling(plan, request)
    _check_sharing(plan, request)
    if plan.mode is PlanMode.SYNC:
        plan = replace(plan, split=_split(plan, request))
    said = {out.name: out.reason for out in plan.left_out}
    left_out = tuple(
        LeftOut(c.name, said.get(c.name) or NOT_IN_PLAN)
        for c in household.candidates
        if c.name not in plan.device_names
    )
    plan = replace(
        plan, left_out=left_out, planner=plan.planner if plan.planner in NAMES else "auto"
    )
    found = simulate_plan(plan, profile, cluster, overlap=True, updates_ahead=not request.clip)
    predicted = Predicted(found.round_seconds, found.samples_per_s, found.peak_bytes)
    memory = {c.name: c.memory for c in household.candidates}
    plan = with_full_memory(
        replace(plan, predicted=predicted),
        *(profile, request, household.holder, memory, household.accelerated),
    )
    for name in sorted(plan.predicted.peak_bytes):
        short = memory[name].shortage(plan.predicted.needed(name))
        if short is not None:
            raise PlanError(short.text(name, plan.predicted.needed(name)))
    return plan


def _check_tiling(plan: Plan, request: JobPlanRequest) -> None:
    tiling = plan.stages[0].tiling
    if tiling is not None and (request.maps is None or tiling.units > len(request.maps.units)):
        tiled = 0 if request.maps is None else len(request.maps.units)
        raise OptionError(
            f"the plan cuts the first {tiling.units} layers into tiles, and this model allows "
            f"that for {tiled}"
        )


def _split(plan: Plan, request: JobPlanRequest) -> BatchSplit:
    """Of the job's batches: a file does not say how large the last micro-batch is."""
    split = BatchSplit(request.batch_size, plan.micro_batch)
    if split.micro_batches != plan.micro_batches:
        raise OptionError(
            f"the plan has {plan.micro_batches} micro-batches of {plan.micro_batch} samples, and a "
            f"batch of this job, {request.batch_size}, is {split.micro_batches} of them"
        )
    return split


def _check_sharing(plan: Plan, request: JobPlanRequest) -> None:
    sharing = request.sharing
    for p, stage in enumerate(plan.stages):
        if len(stage.devices) == 1:
            continue
        where = f"the plan gives stage {p} to {len(stage.devices)} devices"
        if sharing.unshared:
            raise OptionError(f"{where}, which this model does not allow ({sharing.unshared})")
        by_samples = stage.allocation is Allocation.SAMPLES
        if by_samples and request.asynchrony is not None:
            raise OptionError(
                f'{where} by samples, and with --mode async they take turns: "allocation": '
                '"micro_batches"'
            )
        if by_samples and not sharing.divisible:
            raise OptionError(
                f'{where} by samples, which this model does not allow: "allocation": '
                '"micro_batches" may do'
            )
