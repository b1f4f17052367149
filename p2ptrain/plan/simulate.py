"""The predicted timeline of one synchronous round by the cost model (`plan/cost.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from p2ptrain.plan.check import check_plan
from p2ptrain.plan.cluster import Cluster
from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.draft import Draft, Group, peak_bytes
from p2ptrain.plan.engine import Engine, Span
from p2ptrain.plan.lanes import build_engine
from p2ptrain.plan.plan import Plan
from p2ptrain.plan.profile import Profile

EntryKind: TypeAlias = Literal[
    "forward",
    "backward",
    "send input",
    "send output",
    "send gradient",
    "all-reduce",
    "update",
]


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One bar of the timeline.

    Attributes:
        kind: "send input" carries the target too where one device needs both, or the target alone.
        device: who computes or sends.
        stage: the stage that computes, or that the transfer is for.
        micro_batch: None of what concerns the whole round (all-reduce, update).
        start_seconds, end_seconds: from the round's start; a transfer ends when it arrives.
        receiver: of a transfer.
        free_seconds: of a transfer, when its interfaces are free again (`latency` before the end).
    """

    kind: EntryKind
    device: str
    stage: int
    micro_batch: int | None
    start_seconds: float
    end_seconds: float
    receiver: str | None = None
    free_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Simulation:
    """One round as the cost model sees it.

    Attributes:
        busy_seconds: computing time by device, for those in a stage.
        peak_bytes: memory by device.
        timeline: in order of start; empty unless asked for.
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
) -> Simulation:
    """One round of `plan`; with `overlap` as the runtime does it, from one round to the next.

    Raises:
        OptionError: the plan does not belong to this profile and cluster.
    """
    check_plan(plan, profile, cluster)
    cost = CostModel(profile, cluster, overlap=overlap)
    return simulate_draft(cost, draft_of(plan, cost), timeline=timeline)


def draft_of(plan: Plan, cost: CostModel) -> Draft:
    """A plan as a draft."""
    return Draft(
        split=plan.split,
        borders=(0, *(stage.units[1] for stage in plan.stages)),
        groups=tuple(
            Group(
                devices=tuple(cost.index(device.name) for device in stage.devices),
                shares=tuple(device.share for device in stage.devices),
                allocation=stage.allocation,
            )
            for stage in plan.stages
        ),
        warmup=tuple(stage.warmup for stage in plan.stages),
    )


def simulate_draft(cost: CostModel, draft: Draft, *, timeline: bool = False) -> Simulation:
    """One round of `draft`."""
    engine = build_engine(cost, draft, record=timeline)
    seconds = engine.run()
    return Simulation(
        round_seconds=seconds,
        samples_per_s=draft.split.batch_size / seconds if seconds > 0 else 0.0,
        busy_seconds={cost.name(d): busy for d, busy in sorted(engine.busy_seconds.items())},
        peak_bytes={cost.name(d): peak for d, peak in sorted(peak_bytes(cost, draft).items())},
        timeline=_timeline(cost, engine) if timeline else (),
    )


def round_seconds(cost: CostModel, draft: Draft) -> float:
    """Only the time of one round of `draft`."""
    return build_engine(cost, draft).run()


def _timeline(cost: CostModel, engine: Engine) -> tuple[TimelineEntry, ...]:
    entries = [_entry(cost, engine, span) for span in engine.spans]
    entries += _ends(cost, engine)
    return tuple(
        sorted(entries, key=lambda e: (e.start_seconds, e.stage, e.kind, e.micro_batch or 0))
    )


def _entry(cost: CostModel, engine: Engine, span: Span) -> TimelineEntry:
    lane, route = engine.lanes[span.lane], span.route
    if route is None:
        return TimelineEntry(
            kind="forward" if span.kind == "forward" else "backward",
            device=cost.name(lane.device),
            stage=lane.stage,
            micro_batch=span.micro_batch,
            start_seconds=span.start_seconds,
            end_seconds=span.end_seconds,
        )
    return TimelineEntry(
        kind=_SENT[route.carries],
        device=cost.name(route.uplink),
        stage=lane.stage,
        micro_batch=span.micro_batch,
        start_seconds=span.start_seconds,
        end_seconds=span.end_seconds,
        receiver=cost.name(route.downlink),
        free_seconds=span.end_seconds - route.latency_s,
    )


_SENT: Mapping[str, EntryKind] = {
    "input": "send input",
    "output": "send output",
    "gradient": "send gradient",
}


def _ends(cost: CostModel, engine: Engine) -> Sequence[TimelineEntry]:
    """All-reduces, and the updates that follow them or a device's last backward."""
    entries = []
    for lane in engine.lanes:
        if lane.device < 0:  # where the gradients of a stage come together
            continue
        name, end = cost.name(lane.device), lane.ends[-1] if lane.ends else 0.0
        if lane.stage in engine.reduced:
            start, end = engine.reduced[lane.stage]
            entries.append(TimelineEntry("all-reduce", name, lane.stage, None, start, end))
        start, end = engine.updated.get(lane.number, (end, end))
        entries.append(TimelineEntry("update", name, lane.stage, None, start, end))
    return entries
