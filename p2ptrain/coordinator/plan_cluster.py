"""From measurements to a plan. Pure, so that the plan of any household can be tested.

A device that ran out of memory gets a plan for what it really has: its budget only falls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from p2ptrain.coordinator.measured_cluster import (
    MeasuredCluster,
    planner_question,
    pooled_measurements,
    reserved_by_name,
)
from p2ptrain.coordinator.memory_model import with_full_memory
from p2ptrain.errors import PlanError, size_text
from p2ptrain.job.train_options import ReplanMethod
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.plan.compare_kinds import (
    PlanMaker,
    bias_checked_change,
    bias_checked_plan,
    choose_mode,
)
from p2ptrain.plan.pinned_units import PinnedUnits
from p2ptrain.plan.replan.light_search import THOROUGH
from p2ptrain.plan.replan.replan import replan, request_for_same_plan, respipe
from p2ptrain.plan.replan.replica_holders import Replicas
from p2ptrain.plan.types.allocation import Allocation
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.plan.types.weight_versions import Weights
from p2ptrain.process.memory_budget import PROCESS_BYTES
from p2ptrain.tiling.planning.make_plan import make_plan
from p2ptrain.tiling.planning.tiled_plan import simulate_plan

PLANNING_EFFORT = 0.3
"""All devices wait for the plan, and the slowest may be making it."""

MAX_PLANS = 6
"""For budgets that a plan's buffers exceed; each leaves more room for them."""

STRAIGHT = ("pp", "ftpipehd")
"""Planners whose stages have one device each, and keep that: to the last bit the same results."""

UNDIVIDED = ("dp", "single")
"""Planners that give a device all units: a plan close to theirs would be one of another kind."""

T = TypeVar("T")


class RunPlanner(Protocol):
    """Calls a planner: here, or elsewhere."""

    def __call__(self, planner: Callable[[], T], /) -> T: ...


def run_here(planner: Callable[[], T], /) -> T:
    """Without further ado."""
    return planner()


def plan_cluster(
    request: JobPlanRequest, household: MeasuredCluster, run: RunPlanner = run_here
) -> Plan:
    """The plan for `request`, by what the runtime really does.

    What it takes beside the units is known when there is a plan. Where a device has less left,
    that plan no longer fits its budget for units, and planners try again. Where the mode is open,
    of the best plans of both the one that leads to the same accuracy sooner.

    Raises:
        PlanError: nothing fits, or the planner asked for cannot plan this model.
    """
    if request.rounds is None:
        if len(household.candidates) > 1:
            request.sharing.check(request.planner, asynchronous=request.asynchrony is not None)
        return _within_memory(
            request, household, lambda *asked: run(partial(bias_checked_plan, make_plan, *asked))
        )
    rounds_request = request.settled(asynchronous=False)
    rounds = plan_cluster(rounds_request, household, run)
    assert request.asynchrony is not None
    try:
        free = plan_cluster(request.settled(asynchronous=True), household, run)
    except PlanError as error:
        return replace(rounds, mode_reason=f"with --mode async there is no plan: {error}")
    # by the plain cost model, as those without rounds
    seconds = simulate_plan(rounds, *planner_question(rounds_request, household)).round_seconds
    return choose_mode(rounds, seconds, free, request.asynchrony.weights)


def replan_cluster(
    request: JobPlanRequest,
    household: MeasuredCluster,
    present: Plan,
    replicas: Replicas,
    recovery: ReplanMethod,
    repay_seconds: float | None = None,
    *,
    on_all: bool = False,
    run: RunPlanner = run_here,
) -> Plan:
    """A plan for the devices of `household`, in place of `present`; its micro-batch stays.

    A planner asked for by name is obeyed, as where a job starts: of the devices that it uses none
    is left out for speed. Where that has no plan any more, one close to `present` has.

    Args:
        replicas: who has each unit now, by names.
        on_all: planner pp is to use every device, as it does where a job starts.
        run: where planners run.
        repay_seconds: where the change cannot be put off: how long a slower plan may be slower
            for what it saves of the pause; None = it is weighed against the present plan.

    Raises:
        PlanError: nothing fits.
    """
    planner, here = present.planner, frozenset(c.name for c in household.candidates)
    tiled = present.stages[0].tiling is not None  # what is close to it has other tiles
    folds = request.private_first > 0  # a private plan's units are folded
    from_zero = recovery is ReplanMethod.HEAVY or folds or tiled
    is_near = not from_zero and (recovery is ReplanMethod.LIGHT or bool(household.leaving))

    def again(profile: Profile, cluster: Cluster, wanted: PlanRequest) -> Plan:
        if planner in STRAIGHT:
            wanted = replace(wanted, groups=False)
        if from_zero:
            return own(profile, cluster, wanted)
        if not is_near:  # no living device has a part in it
            return respipe(profile, cluster, present, wanted, replicas=replicas).plan
        near = partial(
            replan,
            *(profile, cluster, present, wanted),
            planner=make_plan,
            replicas=replicas,
            effort=THOROUGH if repay_seconds is None else None,  # nothing waits
            repay_seconds=repay_seconds,
        )
        found = run(near).plan
        if repay_seconds is None:
            return found  # it is weighed
        asked = profile, cluster, request_for_same_plan(present, wanted)
        return bias_checked_change(make_plan, *asked, present, found)

    def own(profile: Profile, cluster: Cluster, wanted: PlanRequest) -> Plan:
        return run(
            partial(
                bias_checked_plan,
                make_plan,
                profile,
                cluster,
                request_for_same_plan(present, wanted),
            )
        )

    def on_as_many(profile: Profile, cluster: Cluster, wanted: PlanRequest) -> Plan:
        used = here if on_all else here & present.device_names
        return again(profile, cluster, replace(wanted, required=used - household.leaving))

    obeyed: list[PlanMaker] = []
    if planner in UNDIVIDED and is_near:
        obeyed.append(own)
    if planner == "pp" or (planner != "auto" and is_near):
        obeyed.append(on_as_many)
    for planning in obeyed:
        with suppress(PlanError):  # a device has too little memory by now
            return _within_memory(request, household, planning)
    return _within_memory(request, household, again)


def _within_memory(
    request: JobPlanRequest, household: MeasuredCluster, planning: PlanMaker
) -> Plan:
    profile, cluster = planner_question(request, household)
    found = pooled_measurements(household.candidates, profile, request.batch_size)
    reserved = reserved_by_name(profile, request, household)
    memory = {c.name: c.memory for c in household.candidates}
    _check_room(memory, reserved)
    tight: dict[str, str] = {}
    for left in reversed(range(MAX_PLANS)):
        try:
            plain = _plan_within(cluster, profile, request, planning, household.leaving)
        except PlanError as error:
            if not tight:
                raise
            raise PlanError("; ".join((*tight.values(), str(error)))) from error
        plan = with_full_memory(plain, profile, request, household.holder, memory, household.kinds)
        needed, counted = plan.predicted.needed, plain.predicted.peak_bytes
        tried = {name: memory[name].shortage(needed(name)) for name in memory}
        short = {name: one for name, one in tried.items() if one is not None}
        if not short:
            reasons = tight | dict.fromkeys(household.leaving, "it is leaving")
            return _with_reasons(plan, reasons)
        for name, one in short.items():
            if one.in_host:
                tight[name] = one.reason(name, needed(name))
                part = _part_of_host(memory[name], needed(name)) if left > MAX_PLANS / 2 else 0.0
                reserved[name] = memory[name].compute_bytes - int(part * counted[name])
            else:
                least_bytes = reserved[name] if name in tight else 0
                reserved[name] = max(needed(name).compute_bytes - counted[name], least_bytes)
        cluster = household.cluster(found, reserved)
    name, one = next(iter(short.items()))
    missing = one.of(needed(name)) - one.of(memory[name])
    which = "host memory" if one.in_host else "memory"
    raise PlanError(
        f"{name} has too little {which} for any plan found: {size_text(missing)} missing. Free "
        "some there, allow more with --memory, or use a smaller --micro-batch"
    )


def _part_of_host(has: MemoryBudgets, needed: MemoryBudgets) -> float:
    """For how much of what was planned the host's memory does: that grows with the units, or with
    what crosses their cuts."""
    free_bytes, asked_bytes = (one.of_host - PROCESS_BYTES for one in (has, needed))
    return max(free_bytes, 0) / max(asked_bytes, 1)


def _check_room(memory: Mapping[str, MemoryBudgets], reserved: Mapping[str, int]) -> None:
    """Raises PlanError where no device has any for a layer: planners know nothing of the rest."""
    name = max(memory, key=lambda name: memory[name].compute_bytes - reserved[name])
    has_bytes, taken_bytes = memory[name].compute_bytes, reserved[name]
    if has_bytes <= taken_bytes:
        raise PlanError(
            f"{name} may use {size_text(has_bytes)} of memory, and training takes more than "
            f"{size_text(taken_bytes)} there: {size_text(taken_bytes - has_bytes)} missing. Free "
            "some there, allow more with --memory, or use more devices"
        )


def _with_reasons(plan: Plan, reasons: Mapping[str, str]) -> Plan:
    """With the true reasons why devices have no part, by name."""
    left_out = (replace(out, reason=reasons.get(out.name, out.reason)) for out in plan.left_out)
    return replace(plan, left_out=tuple(left_out))


def _request(
    request: JobPlanRequest, only: frozenset[str] | None, allocations: frozenset[Allocation]
) -> PlanRequest:
    """What planners are asked; `only`: names of the devices that may get work, None = all."""
    how, piece = request.asynchrony, request.batch_size
    if how is not None:
        piece = how.piece(request.batch_size, request.micro_batch)
    return PlanRequest(
        batch_size=piece,
        micro_batch=request.micro_batch or None,
        planner=request.planner,
        min_micro_batch=request.min_micro_batch,
        private=request.private_first > 0,
        only=only,
        groups=not request.sharing.unshared and (how is None or how.may_share),
        allocations=allocations if how is None else frozenset({Allocation.MICRO_BATCHES}),
        mode=PlanMode.SYNC if how is None else PlanMode.ASYNC,
        weights=Weights.STASHED if how is None else how.weights,
        full_depths=how is not None,
        overlap=True,
        updates_ahead=not request.clip,
        effort=PLANNING_EFFORT,
        grid=request.grid,
        groups_of_units=request.groups_of_units,
    )


def _plan_within(
    cluster: Cluster,
    profile: Profile,
    request: JobPlanRequest,
    planning: PlanMaker,
    leaving: frozenset[str],
) -> Plan:
    here = frozenset(device.name for device in cluster.devices)
    tries = list(request.sharing.allocations(request.planner))
    for last, allocations in enumerate(tries, start=1 - len(tries)):
        wanted = _request(request, here - leaving if leaving else None, allocations)
        try:
            plan = _planned(profile, cluster, wanted, request, planning)
            _check_delays(plan, request)
            return plan
        except PlanError:
            if last == 0:
                raise
    raise PlanError("there is no plan for this model")


def _check_delays(plan: Plan, request: JobPlanRequest) -> None:
    """PlanError where a plan's stages cannot keep to the delays that the job asks for."""
    if request.asynchrony is None:
        return
    count = len(plan.stages)
    if request.asynchrony.weights is Weights.DOUBLE:
        pieces = -(-request.batch_size // plan.micro_batch)
        if pieces < count:
            raise PlanError(
                f"with --versions 2 each of the {count} parts needs its own micro-batch, and "
                f"there are {pieces}: use a smaller --micro-batch"
            )


def _planned(
    profile: Profile,
    cluster: Cluster,
    wanted: PlanRequest,
    request: JobPlanRequest,
    planning: PlanMaker,
) -> Plan:
    if not wanted.private:
        return planning(profile, cluster, wanted)
    fold = PinnedUnits(len(profile.units), request.private_first, request.private_last)
    return fold.unfold(planning(fold.profile(profile), fold.cluster(cluster), wanted))
