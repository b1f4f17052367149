"""Whether a job that runs well should change its plan: from measurements to a decision. Pure.

Plans close to the one in force are found in milliseconds. Where profiles were far off or a device
is new, the best plan may be of another kind: then a full search is worth its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from p2ptrain.coordinator.measured_cluster import MeasuredCluster, planner_question
from p2ptrain.errors import size_text
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.plan.compare_kinds import bias_corrected_seconds
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.replan.hysteresis import ReplanAction, ReplanDecision, weigh_replan
from p2ptrain.plan.replan.migration import plan_migration
from p2ptrain.plan.replan.replan import Replanned
from p2ptrain.plan.replan.replica_holders import place_replicas
from p2ptrain.plan.types.plan import Plan
from p2ptrain.tiling.planning.tiled_plan import round_seconds

SEARCH_AGAIN = 1.1
"""So much slower than promised is a plan whose kind may be wrong."""

WORK_OFF = 1.2
"""So many times more or less work than a plan was made for: links weigh less, or more, than it took
them to."""

URGENT = 1.15
"""So much slower, what another plan gains is soon more than a search beside training takes."""


@dataclass(frozen=True, slots=True)
class PresentPlan:
    """The plan in force, as things are now.

    Attributes:
        round_seconds: of a round.
        slower: how many times as long as the plan promised, had it known how much work there is:
            where some stages take more and others less than expected, a round may take what was
            promised, and still be far from what another plan makes of the same devices.
        work: what all its tasks take, by what it expected of them.
    """

    plan: Plan
    round_seconds: float
    slower: float
    work: float = 1.0

    @property
    def is_off(self) -> bool:
        """Whether the plan's kind may be wrong."""
        return self.slower > SEARCH_AGAIN or not 1 / WORK_OFF <= self.work <= WORK_OFF


def present_plan(
    request: JobPlanRequest, household: MeasuredCluster, plan: Plan, work: float = 1.0
) -> PresentPlan:
    """What the plan in force takes with the times, links and devices of now; `work`: of it."""
    profile, cluster = planner_question(request, household)
    ahead = any(stage.goes_ahead for stage in plan.stages)
    cost = CostModel(profile, cluster, overlap=True, mode=plan.mode, updates_ahead=ahead)
    seconds = round_seconds(cost, plan)
    promised = work * plan.predicted.round_seconds
    return PresentPlan(plan, seconds, seconds / promised if promised > 0 else 1.0, work)


def wants_search(request: JobPlanRequest, present: PresentPlan, *, has_new: bool) -> bool:
    """Whether to search for plans of every kind.

    A straight pipeline was asked for by name: then only ones close to it are looked at. Another
    planner asked for by name is obeyed, so that its own plan for now is the one to compare with.
    """
    if request.planner == "pp":
        return False
    return request.planner != "auto" or has_new or present.is_off


def decide_replan(
    request: JobPlanRequest,
    household: MeasuredCluster,
    present: PresentPlan,
    found: Sequence[Plan],
    *,
    remaining_rounds: int | None,
    moved_seconds_ago: Sequence[float],
) -> ReplanDecision:
    """Stay with the plan in force, or go to the fastest found; the first of equally fast ones.

    Whose device leaves must go, however slow what was found is.
    """
    profile, cluster = planner_question(request, household)
    best = min(found, key=bias_corrected_seconds)
    # At a round's border every device has what it trains, and copies are older.
    held = place_replicas(present.plan, chain=False)
    migration = plan_migration(profile, cluster, present.plan, held, best)
    moved = f"moving {size_text(migration.size_bytes)} in {migration.seconds:.2g} s"
    replanned = Replanned(best, migration, 0, moved)
    if present.plan.device_names & household.leaving:
        return ReplanDecision(ReplanAction.MOVE, best, migration, None, moved)
    return weigh_replan(
        present.plan, present.round_seconds, replanned, remaining_rounds, moved_seconds_ago
    )


def fixed_request(request: JobPlanRequest, plan: Plan) -> JobPlanRequest:
    """For a plan from zero: the micro-batch decides results, so it stays as it is in force."""
    return replace(request, micro_batch=plan.micro_batch)
