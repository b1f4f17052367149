"""The bars of a simulated timeline: tasks, transfers, all-reduces and updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.simulation.engine import Engine, LaneSpan
from p2ptrain.plan.simulation.steady import ReplicaExchange, Steady
from p2ptrain.plan.types.timeline import EntryKind, TimelineEntry


def round_timeline(cost: CostModel, engine: Engine) -> tuple[TimelineEntry, ...]:
    """Of an engine that has run, and has recorded its spans."""
    return in_order([*_spans(cost, engine), *_ends(cost, engine)])


def steady_timeline(cost: CostModel, steady: Steady) -> tuple[TimelineEntry, ...]:
    """The measured stretch from time 0, bars cut at its borders.

    Mini-batches keep their numbers. A mini-batch's gradients are exchanged and the weights updated
    as soon as they are there and the exchange before is over.
    """
    engine, (start, end) = steady.engine, steady.window
    exchanges = (_exchanged(cost, engine, exchange) for exchange in steady.exchanges)
    entries = [*_spans(cost, engine), *chain.from_iterable(exchanges)]
    return in_order(
        _moved(entry, start, end)
        for entry in entries
        if entry.end_seconds > start and entry.start_seconds < end
    )


def _moved(entry: TimelineEntry, start: float, end: float) -> TimelineEntry:
    def cut(seconds: float) -> float:
        return min(max(seconds, start), end) - start

    free = entry.free_seconds
    return replace(
        entry,
        start_seconds=cut(entry.start_seconds),
        end_seconds=cut(entry.end_seconds),
        free_seconds=None if free is None else cut(free),
    )


def in_order(entries: Iterable[TimelineEntry]) -> tuple[TimelineEntry, ...]:
    """By their starts."""

    def key(entry: TimelineEntry) -> tuple[float, int, str, int]:
        return entry.start_seconds, entry.stage, entry.kind, entry.micro_batch or 0

    return tuple(sorted(entries, key=key))


def _spans(cost: CostModel, engine: Engine) -> list[TimelineEntry]:
    return [_entry(cost, engine, span) for span in engine.spans]


def _exchanged(
    cost: CostModel, engine: Engine, exchange: ReplicaExchange
) -> Iterator[TimelineEntry]:
    m, end = exchange.mini_batch, exchange.end_seconds
    for lane in engine.lanes:
        if lane.stage == exchange.stage:
            name = cost.name(lane.device)
            if exchange.start_seconds < end:
                yield TimelineEntry("all-reduce", name, lane.stage, m, exchange.start_seconds, end)
            yield TimelineEntry("update", name, lane.stage, m, end, end)


def _entry(cost: CostModel, engine: Engine, span: LaneSpan) -> TimelineEntry:
    lane, route = engine.lanes[span.lane], span.route
    if route is None:
        return TimelineEntry(
            kind=span.kind or "forward",
            device=cost.name(lane.device),
            stage=lane.stage,
            micro_batch=span.micro_batch,
            start_seconds=span.start_seconds,
            end_seconds=span.end_seconds,
        )
    return TimelineEntry(
        kind=SENT[route.carries],
        device=cost.name(route.uplink % len(cost.devices)),
        stage=lane.stage,
        micro_batch=span.micro_batch,
        start_seconds=span.start_seconds,
        end_seconds=span.end_seconds,
        receiver=cost.name(route.downlink % len(cost.devices)),
        free_seconds=span.end_seconds - route.latency_s,
    )


SENT: Mapping[str, EntryKind] = {
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
        name, end = cost.name(lane.device), lane.end
        if lane.stage in engine.reduced:
            start, end = engine.reduced[lane.stage]
            entries.append(TimelineEntry("all-reduce", name, lane.stage, None, start, end))
        start, end = engine.updated.get(lane.number, (end, end))
        entries.append(TimelineEntry("update", name, lane.stage, None, start, end))
    return entries
