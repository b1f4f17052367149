"""The planners by name, and the way from a request to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf

from p2ptrain.errors import OptionError, PlanError
from p2ptrain.plan.check import check_memory, check_plan, check_request
from p2ptrain.plan.cluster import Cluster
from p2ptrain.plan.cost import CostModel, cost_model
from p2ptrain.plan.draft import Draft, Group
from p2ptrain.plan.papers.dp import plan_dp
from p2ptrain.plan.papers.equal_shares import plan_pp
from p2ptrain.plan.papers.ftpipehd import plan_ftpipehd
from p2ptrain.plan.papers.hybrid import plan_hybrid
from p2ptrain.plan.papers.pipedream import plan_pipedream
from p2ptrain.plan.papers.single import plan_single
from p2ptrain.plan.plan import DeviceShare, LeftOut, Plan, PlannedStage, Predicted
from p2ptrain.plan.profile import Profile
from p2ptrain.plan.request import Mode, PlanRequest, Schedule
from p2ptrain.plan.search.auto import plan_auto
from p2ptrain.plan.search.deferring import split_named
from p2ptrain.plan.shared.judge import Judge
from p2ptrain.plan.shared.micro_batches import candidate_splits
from p2ptrain.plan.shared.question import Answer, Planner, Question
from p2ptrain.plan.simulation.simulate import simulate_draft
from p2ptrain.plan.tiling.tiled_plan import may_be_tiled, tiled_plan
from p2ptrain.plan.turning import turn_of
from p2ptrain.plan.work import ROUNDING

PLANNERS: Mapping[str, Planner] = {
    "auto": plan_auto,
    "dp": plan_dp,
    "ftpipehd": plan_ftpipehd,
    "hybrid": plan_hybrid,
    "pipedream": plan_pipedream,
    "pp": plan_pp,
    "single": plan_single,
}

TILES = "tiles"
"""The planner whose plans are no drafts: its stages are judged by `tiling`."""
NAMES = frozenset({*PLANNERS, TILES})
"""All planners."""

BUDGET_TASKS = 200_000
"""Simulated tasks a search may spend, about two microseconds each."""


def make_plan(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
    """Answer `request`. The order in which `cluster` lists its devices does not matter.

    Raises:
        OptionError: an unknown planner or device, times of another model; split backwards wanted
            of a profile without times of weight gradients.
        PlanError: nothing fits; names the unit or the memory, and the bytes missing; or the device
            and the cap that this planner cannot obey.
    """
    planner = PLANNERS.get(request.planner)
    if request.planner == TILES:
        return _tiled(profile, cluster, request)
    if planner is None:
        known = ", ".join(sorted(NAMES))
        raise OptionError(f'unknown planner "{request.planner}" (known: {known})')
    cost = cost_model(profile, cluster, request)
    if request.schedule is Schedule.ZERO_BUBBLE and not cost.can_split:
        raise OptionError(
            "this profile has no "
            '"weight" times, which --schedule zero-bubble needs: make it again with p2ptrain '
            "profile"
        )
    question = _question(cost, request)
    try:
        answer = planner(question)
    except PlanError:
        if request.planner == "auto" and may_be_tiled(cost, request):
            with suppress(PlanError):  # nobody has asked for tiles: what else does not fit counts
                return _tiled_for_auto(cost, cluster, request, inf)
        raise
    if request.planner != "auto":
        answer = replace(answer, draft=split_named(question, answer.draft))
    plan = plan_of(cost, request.planner, answer)
    check_plan(plan, profile, cluster, private=request.private)
    check_memory(plan.predicted.peak_bytes, cluster)
    check_request(plan, profile, request)
    return _or_tiled(cost, plan, cluster, request) if request.planner == "auto" else plan


def _tiled(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
    """The plan of planner `tiles`; on a device alone there is nothing to divide."""
    cost = CostModel(profile, cluster, overlap=request.overlap, mode=request.mode)
    allowed = [d for d in cluster.devices if request.only is None or d.name in request.only]
    if len(allowed) == 1 and request.mode is Mode.SYNC:
        alone = replace(request, planner="single", grid=None, groups_of_units=())
        return replace(make_plan(profile, cluster, alone), planner=TILES)
    plan = tiled_plan(cost, request)
    check_plan(plan, profile, cluster)
    check_memory(plan.predicted.peak_bytes, cluster)
    check_request(plan, profile, request)
    return plan


def _or_tiled(cost: CostModel, plan: Plan, cluster: Cluster, request: PlanRequest) -> Plan:
    """The plan of `auto`, or one with tiles where that is faster."""
    if not may_be_tiled(cost, request):
        return plan
    seconds = plan.predicted.round_seconds
    try:
        tiled = _tiled_for_auto(cost, cluster, request, seconds)
    except PlanError:  # there is a plan without tiles
        return plan
    return tiled if tiled.predicted.round_seconds < seconds else plan


def _tiled_for_auto(cost: CostModel, cluster: Cluster, request: PlanRequest, below: float) -> Plan:
    tiled = tiled_plan(cost, request, below=below, every=False)
    check_plan(tiled, cost.profile, cluster)
    check_memory(tiled.predicted.peak_bytes, cluster)
    check_request(tiled, cost.profile, request)
    return replace(tiled, found_by=TILES)


def plan_of(cost: CostModel, planner: str, answer: Answer) -> Plan:
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
            turn=turn_of(cost, draft, p),
            bucket_bytes=cost.bucket_sizes(group.devices).least_bytes,
        )
        for p, (units, group, warmup) in enumerate(
            zip(draft.units, draft.groups, draft.warmup, strict=True)
        )
    )


def _shares(cost: CostModel, group: Group) -> tuple[DeviceShare, ...]:
    return tuple(
        DeviceShare(cost.name(device), share)
        for device, share in zip(group.devices, group.shares, strict=True)
    )


def _question(cost: CostModel, request: PlanRequest) -> Question:
    devices = _allowed(cost, request)
    caps = {cost.index(name): cap for name, cap in request.caps.items()}
    _check_caps(caps, devices)
    fixed = request.micro_batch is not None or request.mode is Mode.ASYNC
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
        least_piece=None if fixed else request.least_piece,
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
