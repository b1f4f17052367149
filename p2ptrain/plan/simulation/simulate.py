"""Predicted running by the cost model (`plan/cost/cost_model.py`): a synchronous round, or
steadily."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from p2ptrain.errors import OptionError
from p2ptrain.plan.cost.check_plan import check_plan
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup, peak_bytes, split_usually
from p2ptrain.plan.simulation.lanes import build_engine
from p2ptrain.plan.simulation.steady import run_steadily, steady_seconds
from p2ptrain.plan.simulation.timeline import round_timeline, steady_timeline
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import Plan, PlannedStage
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, Schedule
from p2ptrain.plan.types.timeline import TimelineEntry


@dataclass(frozen=True, slots=True)
class Simulation:
    """One round as the cost model sees it; asynchronously a mini-batch in steady running.

    Attributes:
        round_seconds: of a round, or from one mini-batch to the next.
        busy_seconds: computing time by device, for those in a stage.
        peak_bytes: memory by device.
        timeline: in order of start; of steady running a stretch of mini-batches; empty unless
            asked for.
    """

    round_seconds: float
    samples_per_s: float
    busy_seconds: Mapping[str, float]
    peak_bytes: Mapping[str, int]
    timeline: tuple[TimelineEntry, ...]

    @property
    def busy_share(self) -> Mapping[str, float]:
        """Part of the round that each device computes; the rest it waits."""
        if self.round_seconds == 0:
            return dict.fromkeys(self.busy_seconds, 0.0)
        return {name: busy / self.round_seconds for name, busy in self.busy_seconds.items()}


def simulate(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    timeline: bool = True,
    overlap: bool = False,
    updates_ahead: bool = True,
    schedule: Schedule | None = None,
) -> Simulation:
    """One round of `plan`, or steady running of an asynchronous one.

    With `overlap` as the runtime does it, from one round to the next, where it has the memory to
    update before all are done, or has not; with `schedule` as if the plan's backwards were whole
    (1F1B) or split as usual (zero-bubble).

    Raises:
        OptionError: the plan does not belong to this profile and cluster; `overlap` or split
            backwards of an asynchronous plan; `schedule` says auto.
    """
    check_plan(plan, profile, cluster)
    cost = CostModel(
        *(profile, cluster), overlap=overlap, mode=plan.mode, updates_ahead=updates_ahead
    )
    draft = _scheduled(cost, draft_of(plan, cost), schedule)
    return simulate_draft(cost, draft, timeline=timeline)


def _scheduled(cost: CostModel, draft: Draft, schedule: Schedule | None) -> Draft:
    if schedule is None:
        return draft
    if schedule is Schedule.AUTO:
        raise OptionError("schedule auto is for planners: a simulation needs one or the other")
    if schedule is Schedule.ONE_F_ONE_B:
        return replace(draft, held=())
    if cost.mode is PlanMode.ASYNC:
        raise OptionError("schedule zero-bubble works with mode sync only")
    return split_usually(cost, draft)


def draft_of(plan: Plan, cost: CostModel) -> Draft:
    """A plan as a draft. OptionError: it has tiles, which drafts have not (`tiling.planning`)."""
    if any(stage.tiling is not None for stage in plan.stages):
        raise OptionError("a plan with tiles is simulated by tiling.planning")
    return Draft(
        split=plan.split,
        borders=(0, *(stage.units[1] for stage in plan.stages)),
        groups=tuple(group_of(cost, stage) for stage in plan.stages),
        warmup=tuple(stage.warmup for stage in plan.stages),
        held=tuple(stage.held or 0 for stage in plan.stages) if plan.is_split else (),
    )


def group_of(cost: CostModel, stage: PlannedStage) -> StageGroup:
    """The devices of a stage that is not tiled."""
    return StageGroup(
        devices=tuple(cost.index(device.name) for device in stage.devices),
        shares=tuple(device.share for device in stage.devices),
        allocation=stage.allocation,
    )


def simulate_draft(cost: CostModel, draft: Draft, *, timeline: bool = False) -> Simulation:
    """One round of `draft`, or `simulate_steady` in asynchronous mode."""
    if cost.mode is PlanMode.ASYNC:
        return simulate_steady(cost, draft, timeline=timeline)
    engine = build_engine(cost, draft, record=timeline)
    seconds = engine.run()
    return Simulation(
        round_seconds=seconds,
        samples_per_s=_rate(draft.split.batch_size, seconds),
        busy_seconds={cost.name(d): busy for d, busy in sorted(engine.busy_seconds.items())},
        peak_bytes=_peaks(cost, draft),
        timeline=round_timeline(cost, engine) if timeline else (),
    )


def simulate_steady(cost: CostModel, draft: Draft, *, timeline: bool = False) -> Simulation:
    """Steady asynchronous running of `draft`; what it counts is a mini-batch."""
    steady = run_steadily(cost, draft, record=timeline)
    return Simulation(
        round_seconds=steady.seconds,
        samples_per_s=_rate(draft.split.first_samples, steady.seconds),
        busy_seconds={cost.name(d): busy for d, busy in sorted(steady.busy_seconds.items())},
        peak_bytes=_peaks(cost, draft),
        timeline=steady_timeline(cost, steady) if timeline else (),
    )


def predicted_seconds(cost: CostModel, draft: Draft) -> float:
    """What `cost.mode` asks for: only the seconds of a round, or from mini-batch to mini-batch."""
    if cost.mode is PlanMode.ASYNC:
        return steady_seconds(cost, draft)
    return round_seconds(cost, draft)


def _rate(samples: int, seconds: float) -> float:
    return samples / seconds if seconds > 0 else 0.0


def _peaks(cost: CostModel, draft: Draft) -> dict[str, int]:
    return {cost.name(d): peak for d, peak in sorted(peak_bytes(cost, draft).items())}


def round_seconds(cost: CostModel, draft: Draft) -> float:
    """Only the time of one round of `draft`."""
    return build_engine(cost, draft).run()
