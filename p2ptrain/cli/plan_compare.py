"""`p2ptrain plan --compare`: every planner on one question, beside the best plan found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from p2ptrain.cli.output import aligned
from p2ptrain.cli.planner_arguments import PLANNERS
from p2ptrain.errors import PlanError, size_text
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan

_TITLES = (
    *("planner", "seconds", "samples/s", "of auto", "stages", "devices"),
    *("micro-batches", "peak memory"),
)


@dataclass(frozen=True, slots=True)
class PlannerComparison:
    """What every planner made of one question.

    Attributes:
        plans: of those that have one; `auto` first, then the fastest first.
        refused: why the others have none, by name.
    """

    plans: tuple[Plan, ...]
    refused: Mapping[str, str]

    def of_auto(self, plan: Plan) -> float:
        """The plan's samples/s by those of `auto`; 1 where nothing takes time."""
        best = self.plans[0].predicted.samples_per_s
        return plan.predicted.samples_per_s / best if best else 1.0


def compare(profile: Profile, cluster: Cluster, request: PlanRequest) -> PlannerComparison:
    """Ask every planner what `request` asks of one.

    Raises:
        OptionError: as `make_plan`.
        PlanError: `auto`, which has the plans of all others to choose from, finds nothing.
    """
    best = make_plan(profile, cluster, replace(request, planner="auto"))
    plans, refused = [], {}
    for name in PLANNERS:
        if name == "auto":
            continue
        try:
            plans.append(make_plan(profile, cluster, replace(request, planner=name)))
        except PlanError as error:
            refused[name] = str(error)
    plans.sort(key=lambda plan: -plan.predicted.samples_per_s)
    return PlannerComparison((best, *plans), refused)


def comparison_json(comparison: PlannerComparison) -> Iterator[Mapping[str, Any]]:
    """One object a planner: its plan and figures, or why it has none."""
    for plan in comparison.plans:
        yield {
            "planner": plan.planner,
            "round_seconds": plan.predicted.round_seconds,
            "samples_per_s": plan.predicted.samples_per_s,
            "of_auto": comparison.of_auto(plan),
            "devices": len(plan.predicted.peak_bytes),
            "peak_bytes": max(plan.predicted.peak_bytes.values()),
            "plan": plan.to_json(),
        }
    for name, reason in comparison.refused.items():
        yield {"planner": name, "error": reason}


def comparison_text(comparison: PlannerComparison) -> str:
    """A table of the plans, and why the other planners have none."""
    lines = aligned([_TITLES, *(_row(comparison, plan) for plan in comparison.plans)])
    if comparison.refused:
        reasons = (f"  {name}: {reason}" for name, reason in comparison.refused.items())
        lines += ["", "no plan:", *reasons]
    return "\n".join(lines)


def _row(comparison: PlannerComparison, plan: Plan) -> Sequence[str]:
    predicted, count = plan.predicted, plan.split.micro_batches
    return (
        plan.planner,
        f"{predicted.round_seconds:.4g}",
        f"{predicted.samples_per_s:,.1f}",
        f"{comparison.of_auto(plan):.3f}",
        str(len(plan.stages)),
        str(len(predicted.peak_bytes)),
        "none" if plan.mode is PlanMode.ASYNC else f"{count} x {plan.micro_batch}",
        size_text(max(predicted.peak_bytes.values())),
    )
