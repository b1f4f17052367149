"""The re-plan that the light one is compared with: `--recovery respipe`.

A dead device's units go to its successor and nothing else changes (ResPipe, as FTPipeHD describes
it): almost nothing travels, since the successor has the copy, and the slowest stage stays slow
until the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from p2ptrain.errors import PlanError
from p2ptrain.plan.cost.check_plan import check_memory, check_plan
from p2ptrain.plan.cost.cost_model import CostModel, cost_model
from p2ptrain.plan.cost.draft import StageGroup, UnplacedGroup, draft_groups
from p2ptrain.plan.planner_registry import plan_from_draft
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.problem.question import Answer, Question
from p2ptrain.plan.replan.migration import plan_migration
from p2ptrain.plan.replan.replan import Replanned, living_cluster
from p2ptrain.plan.replan.replica_holders import Replicas, place_replicas
from p2ptrain.plan.search.shares import ShareDivider
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import Plan, PlannedStage
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanRequest


def respipe(
    profile: Profile,
    cluster: Cluster,
    plan: Plan,
    request: PlanRequest,
    *,
    dead: Iterable[str] = (),
    replicas: Replicas | None = None,
) -> Replanned:
    """Every dead stage's units to the stage after it, the last one's to the stage before.

    A group that lost some of its devices keeps the others.

    Raises:
        PlanError: the successor's memory is too small, no device is left, the holder is dead, or a
            unit exists nowhere any more.
    """
    cluster = living_cluster(cluster, dead)
    held = replicas or place_replicas(plan)
    cost = cost_model(profile, cluster, request)
    stages = _handed_on(plan, {device.name for device in cluster.devices})
    groups = [_group(cost, plan, stage) for stage in stages]
    borders = (0, *(stage.units[1] for stage in stages))
    fitting = [group for group in groups if group is not None]
    draft = (
        draft_groups(cost, plan.split, borders, fitting) if len(fitting) == len(groups) else None
    )
    if draft is None:
        names = ", ".join(sorted(f'"{d.name}"' for stage in stages for d in stage.devices))
        raise PlanError(
            f"the layers of the lost device do not fit the memory of {names}, which is next: use "
            "--recovery light"
        )
    reasons = dict.fromkeys(range(len(cost.devices)), "--recovery respipe adds no devices")
    new = plan_from_draft(cost, plan.planner, Answer(draft, reasons))
    check_plan(new, profile, cluster, private=request.private)
    check_memory(new.predicted.peak_bytes, cluster)
    migration = plan_migration(profile, cluster, plan, held, new)
    return Replanned(new, migration, 1, "the lost device's layers went to the next device")


def _alive(held: Replicas, cluster: Cluster) -> Replicas:
    names = {device.name for device in cluster.devices}
    return held.without({name for holders in held.holders for name in holders} - names)


def _handed_on(plan: Plan, alive: set[str]) -> list[PlannedStage]:
    """The living stages, each with the units of the dead ones before it."""
    stages: list[PlannedStage] = []
    first = 0
    for stage in plan.stages:
        devices = tuple(device for device in stage.devices if device.name in alive)
        if devices:
            stages.append(replace(stage, units=(first, stage.units[1]), devices=devices))
            first = stage.units[1]
    if not stages:
        raise PlanError("all devices of the plan are lost")
    last = plan.stages[-1].units[1]
    stages[-1] = replace(stages[-1], units=(stages[-1].units[0], last))
    if len(stages) == 2 and stages[0].devices == stages[1].devices:
        return [replace(stages[0], units=(0, last))]  # a private plan whose middle is gone
    return stages


def _group(cost: CostModel, plan: Plan, stage: PlannedStage) -> StageGroup | None:
    """The stage's devices; their shares change only where one of them is gone."""
    devices = tuple(cost.index(device.name) for device in stage.devices)
    shares = tuple(device.share for device in stage.devices)
    before = next(old for old in plan.stages if stage.devices[0] in old.devices)
    if len(devices) > 1 and len(devices) == len(before.devices):
        return StageGroup(devices, shares, stage.allocation)
    question = Question(Judge(cost, 0), [plan.split], devices)
    part = UnplacedGroup(devices, stage.allocation)
    return ShareDivider(question).group(plan.split, part, stage.units)
