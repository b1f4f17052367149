"""From a request to a plan, tiles included: the entry for all callers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import inf

from p2ptrain.errors import OptionError, PlanError
from p2ptrain.plan.cost.check_plan import check_memory, check_plan, check_request
from p2ptrain.plan.cost.cost_model import CostModel, cost_model
from p2ptrain.plan.planner_registry import PLANNERS, plan_from_draft, question_of
from p2ptrain.plan.search.zero_bubble import split_planner_answer
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest, Schedule
from p2ptrain.tiling.planning.tiled_plan import may_be_tiled, tiled_plan

TILES = "tiles"
"""The planner whose plans are no drafts: its stages are judged by `tiling`."""

NAMES = frozenset({*PLANNERS, TILES})
"""All planners."""


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
    question = question_of(cost, request)
    try:
        answer = planner(question)
    except PlanError:
        if request.planner == "auto" and may_be_tiled(cost, request):
            with suppress(PlanError):  # tiles were not asked for: the first error counts
                return _tiled_for_auto(cost, cluster, request, inf)
        raise
    if request.planner != "auto":
        answer = replace(answer, draft=split_planner_answer(question, answer.draft))
    plan = plan_from_draft(cost, request.planner, answer)
    check_plan(plan, profile, cluster, private=request.private)
    check_memory(plan.predicted.peak_bytes, cluster)
    check_request(plan, profile, request)
    return _or_tiled(cost, plan, cluster, request) if request.planner == "auto" else plan


def _tiled(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
    """The plan of planner `tiles`; on a device alone there is nothing to divide."""
    cost = CostModel(profile, cluster, overlap=request.overlap, mode=request.mode)
    allowed = [d for d in cluster.devices if request.only is None or d.name in request.only]
    if len(allowed) == 1 and request.mode is PlanMode.SYNC:
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
