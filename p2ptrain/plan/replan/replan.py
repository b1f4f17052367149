"""The light re-plan: a plan close to the old one, in milliseconds, that moves few bytes.

After Asteroid (section 3.4): when a device is gone its work is spread over the others by capacity,
by moving the cut points. Asteroid keeps the order of the stages; here orders a few changes
away are tried too (`light_search`), all of them by one batched dynamic programme
(`order_cuts`), the best few by simulation. Of all drafts within a tolerance of the fastest, its
neighbours among them, the one that moves fewest bytes is chosen.

    old order, without the dead ---> near orders ---> best cuts of each ---> simulate the best
          ^                              |                                          |
          +------ best order so far <----+             cuts beside the fastest's <--+

The micro-batch stays as it is: it decides the order of floating-point sums, and a recovered run
must equal an undisturbed one.

`respipe` is what that is compared with (`--recovery respipe`): a dead device's units go to its
successor and nothing else changes (ResPipe, as FTPipeHD describes it). Almost nothing travels,
since the successor has the copy, and the slowest stage stays slow until the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from p2ptrain.errors import PlanError, size_text
from p2ptrain.plan.compare_kinds import PlanMaker
from p2ptrain.plan.cost.check_plan import check_memory, check_plan
from p2ptrain.plan.cost.cost_model import CostModel, cost_model
from p2ptrain.plan.cost.draft import StageGroup, UnplacedGroup, draft_groups
from p2ptrain.plan.planner_registry import plan_from_draft
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.problem.question import Answer, Question
from p2ptrain.plan.replan.light_search import LightSearch, ReplanEffort
from p2ptrain.plan.replan.migration import Migration, Pause, plan_migration
from p2ptrain.plan.replan.replica_holders import Replicas, place_replicas
from p2ptrain.plan.search.shares import ShareDivider
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import Plan, PlannedStage
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest


@dataclass(frozen=True, slots=True)
class Replanned:
    """A new plan and how to get there.

    Attributes:
        evaluated: drafts simulated.
        reason: in a sentence, for logs and users.
    """

    plan: Plan
    migration: Migration
    evaluated: int
    reason: str


def replan(
    profile: Profile,
    cluster: Cluster,
    plan: Plan,
    request: PlanRequest,
    *,
    planner: PlanMaker,
    dead: Iterable[str] = (),
    replicas: Replicas | None = None,
    effort: ReplanEffort | None = None,
    repay_seconds: float | None = None,
) -> Replanned:
    """The light re-plan of `plan` for the cluster as it is now.

    Arguments:
        cluster: with the speeds and links of now; a device of `plan` that is not in it is dead.
        request: its constraints hold; its planner, batch size and micro-batch are the plan's.
        planner: makes a plan from zero where no plan close to the old one fits.
        replicas: who has each unit; by default what chain replication of `plan` placed.
        effort: how much to look at; by default about 20 ms (median of 8 devices and 64 units).
        repay_seconds: training stands still until bytes have moved, and a plan that is slower for
            so long may lose less than that; None: training continues, or was about to end.

    Raises:
        PlanError: nothing fits, the holder is dead, or a unit exists nowhere any more.
    """
    cluster = living_cluster(cluster, dead)
    alive = {device.name for device in cluster.devices}
    held = replicas or place_replicas(plan)
    held = held.without({name for names in held.holders for name in names} - alive)
    cost = cost_model(profile, cluster, request)
    pause = None if repay_seconds is None else Pause(cost, cluster, held, repay_seconds)
    search = LightSearch(cost, plan, request, held, effort, pause)
    best = search.run()
    if best is None:
        return _from_zero(planner, profile, cluster, plan, request, held)
    reasons = dict.fromkeys(search.allowed, "no place was found where it makes training faster")
    found_by = "replan" if plan.planner == "auto" else None
    new = plan_from_draft(search.cost, plan.planner, Answer(best.draft, reasons, found_by))
    check_plan(new, profile, cluster, private=request.private)
    check_memory(new.predicted.peak_bytes, cluster)
    migration = plan_migration(profile, cluster, plan, held, new)
    return Replanned(new, migration, search.evaluated, _reason(plan, new, migration))


def living_cluster(cluster: Cluster, dead: Iterable[str]) -> Cluster:
    """The cluster without those devices.

    Raises:
        PlanError: the data holder is one of them; without data nothing can be trained.
    """
    gone = frozenset(dead)
    if cluster.holder.name in gone:
        raise PlanError(
            f"{cluster.holder.name}, which has the data, is gone: training waits until it is back"
        )
    devices = tuple(device for device in cluster.devices if device.name not in gone)
    links = {pair: link for pair, link in cluster.links.items() if not gone & set(pair)}
    return replace(cluster, devices=devices, links=links)


def request_for_same_plan(plan: Plan, request: PlanRequest) -> PlanRequest:
    """`request` for the plan's own planner, batch and micro-batch."""
    window = request.mode is PlanMode.ASYNC  # of mini-batches, each as large as a micro-batch
    return replace(
        request,
        batch_size=plan.split.micro_batch if window else plan.split.batch_size,
        micro_batch=plan.split.micro_batch,
        planner=plan.planner,
    )


def _from_zero(
    planner: PlanMaker,
    profile: Profile,
    cluster: Cluster,
    plan: Plan,
    request: PlanRequest,
    held: Replicas,
) -> Replanned:
    """Where no plan close to the old one fits: any plan that does, or PlanError."""
    new = planner(profile, cluster, request_for_same_plan(plan, request))
    migration = plan_migration(profile, cluster, plan, held, new)
    return Replanned(new, migration, 0, "no plan close to the old one fits: a new one was made")


def _reason(old: Plan, new: Plan, migration: Migration) -> str:
    before = old.device_names
    after = new.device_names
    changes = [f'without "{name}"' for name in sorted(before - after)]
    changes += [f'with "{name}"' for name in sorted(after - before)]
    if not changes:
        same = new.stages == old.stages
        changes = ["nothing changed" if same else "work divided again"]
    return (
        f"{', '.join(changes)}: {new.predicted.samples_per_s:.4g} samples/s after moving "
        f"{size_text(migration.size_bytes)} in {migration.seconds:.2g} s"
    )


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
    cost.mixes |= plan.mode is PlanMode.SYNC  # what it hands on stays as it is
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
