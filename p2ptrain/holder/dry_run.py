"""A plan for the household as it is, without anything being trained by it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

from p2ptrain.aio.threads import run_in_background
from p2ptrain.coordinator.cluster_profile import ClusterProfiler
from p2ptrain.coordinator.measured_cluster import MeasuredCluster, planner_question
from p2ptrain.holder.plan_step import DeviceFindings, PlannedAttempt, PlanStep
from p2ptrain.holder.planner_client import Planner
from p2ptrain.holder.reconfiguration import plan_reply
from p2ptrain.job.planning_files import write_whole
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.mesh.interface import MemberState, Mesh
from p2ptrain.messages.assign import placed_stages
from p2ptrain.messages.assignment import FIRST
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.messages.reconfigure import ReconfigureReply, ReconfigureRequest
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.recovery.choose_version import KnownPast, VersionChoice
from p2ptrain.recovery.cores.reconfigure_events import MakePlan
from p2ptrain.recovery.generation_request import GenerationRequest, ReconfigureReason
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.version import Version
from p2ptrain.tiling.planning.profile_maps import with_windows

_EPOCH = 1


async def plan_only(
    mesh: Mesh,
    planning: JobPlanRequest,
    surveyor: ClusterProfiler,
    given: Plan | None,
    options: TrainOptions,
    units: int,
) -> ReconfigureReply:
    """Measure the members and plan as the job would; write what the options ask for.

    Raises:
        UserError: no plan fits, or `given` does not.
    """
    alive = frozenset(m.id for m in mesh.members.values() if m.state is MemberState.ALIVE)
    version = Version(planning.first_step, 0)
    past = KnownPast(FIRST, planning.first_step)
    reason, me = ReconfigureReason.START, mesh.self_id
    ask = GenerationRequest(1, _EPOCH, reason, units, me, alive, past)
    request = ReconfigureRequest(planning, ask, None, options.recovery, given=given)
    step = PlanStep(
        mesh, request, surveyor, Planner(mesh, surveyor, lambda *_: None), DeviceFindings()
    )
    choice = VersionChoice(version, (), 0, "nothing is trained")
    made = await step.plan(MakePlan(_EPOCH, choice, alive, {}, {}))
    ids = {candidate.name: device for device, candidate in made.candidates.items()}
    kinds = {device: candidate.compute for device, candidate in made.candidates.items()}
    placed = Placement(_EPOCH, me, version, FIRST, placed_stages(made.plan, ids, kinds))
    reply = plan_reply(planning, made, placed, choice)
    await run_in_background(partial(_write, planning, made, reply, surveyor, mesh.name, options))
    return reply


def _write(
    planning: JobPlanRequest,
    made: PlannedAttempt,
    reply: ReconfigureReply,
    surveyor: ClusterProfiler,
    holder: str,
    options: TrainOptions,
) -> None:
    profile, cluster = _measured(planning, made, surveyor, holder)
    for path, content in (
        (options.write_profile, profile.to_json()),
        (options.write_cluster, cluster.to_json()),
        (options.write_plan, dict(reply.plan)),
    ):
        if path is not None:
            write_whole(path, json.dumps(content, indent=1, ensure_ascii=False))


def _measured(
    planning: JobPlanRequest, made: PlannedAttempt, surveyor: ClusterProfiler, holder: str
) -> tuple[Profile, Cluster]:
    household = MeasuredCluster.of(made.candidates.values(), surveyor.links, holder, frozenset())
    profile, cluster = planner_question(planning, household)
    cluster = replace(cluster, devices=tuple(sorted(cluster.devices, key=lambda one: one.name)))
    return profile if planning.maps is None else with_windows(profile, planning.maps), cluster
