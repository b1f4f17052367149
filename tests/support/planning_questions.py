"""Questions put to the planners by several property tests, and what every answer must be."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from p2ptrain.errors import PlanError
from p2ptrain.plan.cost.check_plan import check_memory, check_plan
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan


def tried(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan | None:
    """The plan, or None where nothing is feasible."""
    try:
        return make_plan(profile, cluster, request)
    except PlanError:
        return None


def sound_plan(
    profile: Profile, cluster: Cluster, request: PlanRequest, random: Random
) -> Plan | None:
    """`tried`, having checked it: units covered, memory kept, listing order irrelevant."""
    plan = tried(profile, cluster, request)
    shuffled = list(cluster.devices)
    random.shuffle(shuffled)
    assert tried(profile, replace(cluster, devices=tuple(shuffled)), request) == plan
    if plan is None:
        return None
    check_plan(plan, profile, cluster, private=request.private)
    check_memory(plan.predicted.peak_bytes, cluster)
    assert plan.split.batch_size == request.batch_size
    return plan
