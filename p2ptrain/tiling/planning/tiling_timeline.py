"""The bars of a round in tiles, by device, from what the engine has timed of all tiles together.

    device with tiles   F0 x F0   ...   B0 x B0   ...  sum  update
    behind                      F0 B0                       update

A pass through the tiles is what each device computes between exchanges (x: halos and statistics);
what enters and leaves is one device's after another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.simulation.engine import FEED, Engine, LaneSpan, TransferRoute
from p2ptrain.plan.simulation.timeline import SENT, in_order
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.timeline import EntryKind, TimelineEntry
from p2ptrain.tiling.planning.tiled_pipeline import Passes, tile_parts
from p2ptrain.tiling.planning.tiling_problem import Passage
from p2ptrain.tiling.planning.tiling_simulation import Simulated, TileSpan


def tiled_timeline(
    cost: CostModel, plan: Plan, engine: Engine, passes: Passes, simulated: Simulated
) -> tuple[TimelineEntry, ...]:
    """Of an engine that has run, and has recorded its spans; without updates."""
    return in_order(_Bars(cost, plan, engine, passes, simulated).all())


@dataclass(frozen=True, slots=True)
class _Bars:
    cost: CostModel
    plan: Plan
    engine: Engine
    passes: Passes
    simulated: Simulated

    def all(self) -> Iterator[TimelineEntry]:
        parts = tile_parts(self.plan.split)
        for span in self.engine.spans:
            if span.route is not None:
                yield from self._sent(span, span.route)
            elif span.lane == 0:
                yield from self._in_tiles(span, parts[span.micro_batch])
            else:
                yield self._computed(span)
        for p, (start, end) in self.engine.reduced.items():
            for device in self.plan.stages[p].devices if end > start else ():
                yield TimelineEntry("all-reduce", device.name, p, None, start, end)

    @property
    def _tiled(self) -> Sequence[str]:
        """In the order of their tiles, as in `Costs`."""
        return [device.name for device in self.plan.stages[0].devices]

    @property
    def _behind(self) -> Sequence[tuple[int, str]]:
        """(stage, device) of every lane but the tiles'."""
        stages = enumerate(self.plan.stages[1:], 1)
        return [(p, device.name) for p, stage in stages for device in stage.devices]

    def _name(self, lane: int) -> str:
        """Of the device of a lane behind the tiles."""
        return self._behind[lane - 1][1]

    def _stage(self, lane: int) -> int:
        return self._behind[lane - 1][0] if lane else 0

    def _computed(self, span: LaneSpan) -> TimelineEntry:
        ends = span.start_seconds, span.end_seconds
        kind, stage = span.kind or "forward", self._stage(span.lane)
        return TimelineEntry(kind, self._name(span.lane), stage, span.micro_batch, *ends)

    def _in_tiles(self, span: LaneSpan, part: float) -> Iterator[TimelineEntry]:
        """What each device does of a pass, of which a smaller micro-batch takes its part."""
        simulated = self.simulated
        done: Sequence[TileSpan] = simulated.forward_spans
        kind: EntryKind = "forward"
        if span.kind == "backward":
            done, kind = simulated.backward_spans, "backward"
        for one in done:
            yield TimelineEntry(
                kind="exchange" if one.exchanges else kind,
                device=self._tiled[one.device],
                stage=0,
                micro_batch=span.micro_batch,
                start_seconds=span.start_seconds + part * one.start_seconds,
                end_seconds=span.start_seconds + part * one.end_seconds,
            )

    def _sent(self, span: LaneSpan, route: TransferRoute) -> Iterator[TimelineEntry]:
        sender, receiver = route.sender, route.receiver
        source = self.cost.name(self.cost.holder) if sender == FEED else ""
        passage = self._passage(sender, receiver)
        if passage is None:
            names = source or self._name(sender), self._name(receiver)
            yield self._transfer(span, route, names, (span.start_seconds, span.end_seconds))
            return
        # of a smaller micro-batch, or of a part of its samples, as much less
        part = route.seconds / passage.carried_seconds if passage.parts else 0.0
        free = span.start_seconds
        for device, seconds in passage.parts:
            start, free = free, free + part * seconds
            tiled = self._tiled[device]
            names = (tiled, self._name(receiver)) if receiver else (source, tiled)
            if not receiver and sender != FEED:
                names = self._name(sender), tiled
            yield self._transfer(span, route, names, (start, free + passage.latency_s))

    def _passage(self, sender: int, receiver: int) -> Passage | None:
        """What goes in or out of the tiles; None of what does neither."""
        if receiver == 0:
            if sender == FEED:
                return self.passes.entering
            return self.passes.returning[sender - 1]
        return self.passes.leaving[receiver - 1] if sender == 0 else None

    def _transfer(
        self,
        span: LaneSpan,
        route: TransferRoute,
        names: tuple[str, str],
        ends: tuple[float, float],
    ) -> TimelineEntry:
        return TimelineEntry(
            kind=SENT[route.carries],
            device=names[0],
            stage=self._stage(span.lane),
            micro_batch=span.micro_batch,
            start_seconds=ends[0],
            end_seconds=ends[1],
            receiver=names[1],
            free_seconds=ends[1] - route.latency_s,
        )
