"""The planners by name, and the way from a request to a plan."""

from __future__ import annotations

from collections.abc import Mapping

from p2ptrain.errors import PlanError
from p2ptrain.plan.cost.check_plan import ROUNDING
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup
from p2ptrain.plan.planners.data_parallel import plan_dp, plan_single
from p2ptrain.plan.planners.equal_shares import plan_pp
from p2ptrain.plan.planners.ftpipehd import plan_ftpipehd
from p2ptrain.plan.planners.hybrid import plan_hybrid
from p2ptrain.plan.planners.pipedream import plan_pipedream
from p2ptrain.plan.problem.candidates import candidate_splits
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.problem.question import Answer, Planner, Question
from p2ptrain.plan.search.auto import plan_auto
from p2ptrain.plan.simulation.allreduce import allreduce_turn
from p2ptrain.plan.simulation.simulate import simulate_draft
from p2ptrain.plan.types.plan import DeviceShare, LeftOut, Plan, PlannedStage, Predicted
from p2ptrain.plan.types.request import PlanMode, PlanRequest

PLANNERS: Mapping[str, Planner] = {
    "auto": plan_auto,
    "dp": plan_dp,
    "ftpipehd": plan_ftpipehd,
    "hybrid": plan_hybrid,
    "pipedream": plan_pipedream,
    "pp": plan_pp,
    "single": plan_single,
}

BUDGET_TASKS = 200_000
"""Simulated tasks a search may spend, about two microseconds each."""


def plan_from_draft(cost: CostModel, planner: str, answer: Answer) -> Plan:
    """The draft decided, simulated, as a plan."""
    draft = answer.draft
    simulation = simulate_draft(cost, draft)
    used = frozenset(draft.devices)
    unused = [device for device in range(len(cost.devices)) if device not in used]
    return Plan(
        planner=planner,
        split=draft.split,
        stages=_stages(cost, draft),
        predicted=Predicted(
            simulation.round_seconds, simulation.samples_per_s, simulation.peak_bytes
        ),
        left_out=tuple(
            LeftOut(
                cost.name(device), answer.reasons.get(device, "--exclude or --require forbid it")
            )
            for device in unused
        ),
        found_by=answer.found_by,
        mode=cost.mode,
    )


def _stages(cost: CostModel, draft: Draft) -> tuple[PlannedStage, ...]:
    return tuple(
        PlannedStage(
            units,
            _shares(cost, group),
            warmup,
            group.allocation,
            held=draft.held[p] if draft.splits(p) else None,
            turn=allreduce_turn(cost, draft, p),
            bucket_bytes=cost.bucket_sizes(group.devices).least_bytes,
        )
        for p, (units, group, warmup) in enumerate(
            zip(draft.units, draft.groups, draft.warmup, strict=True)
        )
    )


def _shares(cost: CostModel, group: StageGroup) -> tuple[DeviceShare, ...]:
    return tuple(
        DeviceShare(cost.name(device), share)
        for device, share in zip(group.devices, group.shares, strict=True)
    )


def question_of(cost: CostModel, request: PlanRequest) -> Question:
    devices = _allowed(cost, request)
    caps = {cost.index(name): cap for name, cap in request.caps.items()}
    _check_caps(caps, devices)
    fixed = request.micro_batch is not None or request.mode is PlanMode.ASYNC
    return Question(
        judge=Judge(cost, int(BUDGET_TASKS * request.effort)),
        splits=candidate_splits(cost, request),
        devices=devices,
        private=request.private,
        required=frozenset(cost.index(name) for name in request.required),
        caps=caps,
        groups=request.groups,
        allocations=request.allocations,
        effort=request.effort,
        min_micro_batch=None if fixed else request.min_micro_batch,
        schedule=request.wanted_schedule,
    )


def _check_caps(caps: Mapping[int, float], devices: tuple[int, ...]) -> None:
    together = sum(caps.get(device, 1.0) for device in devices)
    if together < 1 - ROUNDING:
        raise PlanError(
            f"the --cap values of all devices together allow only {together:.3g} of the work: "
            "raise one, or allow another device"
        )


def _allowed(cost: CostModel, request: PlanRequest) -> tuple[int, ...]:
    if request.only is None:
        return tuple(range(len(cost.devices)))
    allowed = sorted(cost.index(name) for name in request.only)
    if not allowed:
        raise PlanError("no device is left to use: exclude fewer")
    if request.private and cost.holder not in allowed:
        name = cost.name(cost.holder)
        raise PlanError(f"with --private the plan needs {name}, which has the data")
    return tuple(allowed)
