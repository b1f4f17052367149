"""The predicted timeline of one synchronous round by the plain cost model (`plan/cost.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2ptrain.errors import PlanError
from p2ptrain.plan.check import check_plan
from p2ptrain.plan.cluster import Cluster
from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.draft import Draft, peak_bytes
from p2ptrain.plan.engine import FEED, Carried, Engine, Lane, Route, Span
from p2ptrain.plan.plan import Plan
from p2ptrain.plan.profile import Profile
from p2ptrain.plan.schedule import Kind, one_f_one_b


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One bar of the timeline.

    Attributes:
        kind: "forward", "backward", "send input" (with it the target, or the target alone),
            "send output" or "send gradient".
        device: who computes or sends.
        stage: the stage that computes, or that the transfer is for.
        start_seconds, end_seconds: from the round's start; a transfer ends when it arrives.
        receiver: of a transfer.
    """

    kind: str
    device: str
    stage: int
    micro_batch: int
    start_seconds: float
    end_seconds: float
    receiver: str | None = None


@dataclass(frozen=True, slots=True)
class Simulation:
    """One round as the plain cost model sees it.

    Attributes:
        busy_seconds: computing time by device.
        peak_bytes: memory by device.
        timeline: in order of start; empty unless asked for.
    """

    round_seconds: float
    samples_per_s: float
    busy_seconds: Mapping[str, float]
    peak_bytes: Mapping[str, int]
    timeline: tuple[TimelineEntry, ...]


def simulate(
    plan: Plan, profile: Profile, cluster: Cluster, *, timeline: bool = True
) -> Simulation:
    """One round of `plan`.

    Raises:
        OptionError: the plan does not belong to this profile and cluster.
        PlanError: a stage of several devices, which is not simulated yet.
    """
    check_plan(plan, profile, cluster)
    cost = CostModel(profile, cluster)
    return simulate_draft(cost, draft_of(plan, cost), timeline=timeline)


def draft_of(plan: Plan, cost: CostModel) -> Draft:
    """A plan of single-device stages as a draft; PlanError where a stage has several devices."""
    for p, stage in enumerate(plan.stages):
        if len(stage.devices) > 1:
            raise PlanError(f"stage {p} has {len(stage.devices)} devices: only one is supported")
    return Draft(
        split=plan.split,
        borders=(0, *(stage.units[1] for stage in plan.stages)),
        devices=tuple(cost.index(stage.devices[0].name) for stage in plan.stages),
        warmup=tuple(stage.warmup for stage in plan.stages),
    )


def simulate_draft(cost: CostModel, draft: Draft, *, timeline: bool = False) -> Simulation:
    """One round of `draft`."""
    engine = Engine(_lanes(cost, draft), draft.split.micro_batches, record=timeline)
    seconds = engine.run()
    return Simulation(
        round_seconds=seconds,
        samples_per_s=draft.split.batch_size / seconds if seconds > 0 else 0.0,
        busy_seconds={cost.name(d): busy for d, busy in sorted(engine.busy_seconds.items())},
        peak_bytes={cost.name(d): peak for d, peak in sorted(peak_bytes(cost, draft).items())},
        timeline=_timeline(cost, engine.lanes, engine.spans),
    )


def round_seconds(cost: CostModel, draft: Draft) -> float:
    """Only the time of one round of `draft`."""
    return Engine(_lanes(cost, draft), draft.split.micro_batches).run()


def _lanes(cost: CostModel, draft: Draft) -> list[Lane]:
    lanes = [_lane(cost, draft, p) for p in range(len(draft.devices))]
    for p in range(1, len(lanes)):
        each = cost.cut_bytes(draft.borders[p])
        lanes[p - 1].output = _route(cost, draft, "output", p - 1, p, each)
        lanes[p].gradient = _route(cost, draft, "gradient", p, p - 1, each)
    last = len(lanes) - 1
    sizes = (cost.profile.input_bytes, cost.profile.target_bytes)
    if last == 0:
        _feed(cost, draft, lanes, 0, sum(sizes))
    else:
        _feed(cost, draft, lanes, 0, sizes[0])
        _feed(cost, draft, lanes, last, sizes[1])
    return lanes


def _lane(cost: CostModel, draft: Draft, p: int) -> Lane:
    split, device, last = draft.split, draft.devices[p], len(draft.devices) - 1
    count = split.micro_batches
    full = cost.stage_seconds(device, *draft.units[p], split.first_samples)
    ragged = cost.stage_seconds(device, *draft.units[p], split.last_samples)
    return Lane(
        stage=p,
        device=device,
        actions=one_f_one_b(count, draft.warmup[p]),
        seconds={"forward": (full[0], ragged[0]), "backward": (full[1], ragged[1])},
        missing={"forward": [int(p > 0)] * count, "backward": [int(p < last)] * count},
    )


def _feed(cost: CostModel, draft: Draft, lanes: Sequence[Lane], p: int, each: int) -> None:
    """Let the holder feed stage p `each` bytes a sample; what is its own costs nothing."""
    if draft.devices[p] == cost.holder:
        return
    lanes[p].feed = _route(cost, draft, "input", FEED, p, each)
    lanes[p].missing["forward"] = [count + 1 for count in lanes[p].missing["forward"]]


def _route(
    cost: CostModel, draft: Draft, carries: Carried, sender: int, receiver: int, each: int
) -> Route:
    uplink = cost.holder if sender == FEED else draft.devices[sender]
    link = cost.link(uplink, draft.devices[receiver])
    samples = draft.split.first_samples, draft.split.last_samples
    wakes: Kind = "backward" if carries == "gradient" else "forward"
    return Route(
        carries=carries,
        sender=sender,
        receiver=receiver,
        uplink=uplink,
        downlink=draft.devices[receiver],
        wakes=wakes,
        seconds=(samples[0] * each / link.bytes_per_s, samples[1] * each / link.bytes_per_s),
        latency_s=link.latency_s,
    )


def _timeline(
    cost: CostModel, lanes: Sequence[Lane], spans: Sequence[Span]
) -> tuple[TimelineEntry, ...]:
    entries = [_entry(cost, lanes[span.lane], span) for span in spans]
    return tuple(sorted(entries, key=lambda e: (e.start_seconds, e.stage, e.kind, e.micro_batch)))


def _entry(cost: CostModel, lane: Lane, span: Span) -> TimelineEntry:
    route = span.route
    return TimelineEntry(
        kind=f"send {route.carries}" if route else str(span.kind),
        device=cost.name(route.uplink if route else lane.device),
        stage=lane.stage,
        micro_batch=span.micro_batch,
        start_seconds=span.start_seconds,
        end_seconds=span.end_seconds,
        receiver=cost.name(route.downlink) if route else None,
    )
