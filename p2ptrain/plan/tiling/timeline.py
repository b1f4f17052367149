"""The bars of a round in tiles, by device, from what the engine has timed of all tiles together.

    device with tiles   F0 x F0   ...   B0 x B0   ...  sum  update
    behind                      F0 B0                       update

A pass through the tiles is what each device computes between exchanges (x: halos and statistics);
what enters and leaves is one device's after another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.plan import Plan
from p2ptrain.plan.simulation.engine import FEED, Engine, Span
from p2ptrain.plan.simulation.timeline import SENT, EntryKind, TimelineEntry, in_order
from p2ptrain.plan.tiling.exchanges import Passage
from p2ptrain.plan.tiling.row import Passes, tile_parts
from p2ptrain.plan.tiling.simulate import Simulated, TileSpan


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
                yield from self._sent(span, parts[span.micro_batch])
            elif span.lane == 0:
                yield from self._in_tiles(span, parts[span.micro_batch])
            else:
                yield self._behind(span)
        start, end = self.engine.reduced[0]
        for name in self._tiled if end > start else ():
            yield TimelineEntry("all-reduce", name, 0, None, start, end)

    @property
    def _tiled(self) -> Sequence[str]:
        """In the order of their tiles, as in `Costs`."""
        return [device.name for device in self.plan.stages[0].devices]

    def _name(self, lane: int) -> str:
        """Of the one device of a stage behind the tiles."""
        return self.plan.stages[lane].devices[0].name

    def _behind(self, span: Span) -> TimelineEntry:
        ends = span.start_seconds, span.end_seconds
        kind = span.kind or "forward"
        return TimelineEntry(kind, self._name(span.lane), span.lane, span.micro_batch, *ends)

    def _in_tiles(self, span: Span, part: float) -> Iterator[TimelineEntry]:
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

    def _sent(self, span: Span, part: float) -> Iterator[TimelineEntry]:
        assert span.route is not None
        sender, receiver = span.route.sender, span.route.receiver
        source = self.cost.name(self.cost.holder) if sender == FEED else ""
        passage = self._passage(sender, receiver)
        if passage is None:
            names = source or self._name(sender), self._name(receiver)
            yield self._transfer(span, names, span.start_seconds, span.end_seconds)
            return
        free = span.start_seconds
        for device, seconds in passage.parts:
            start, free = free, free + part * seconds
            tiled = self._tiled[device]
            names = (tiled, self._name(receiver)) if receiver else (source, tiled)
            if not receiver and sender != FEED:
                names = self._name(sender), tiled
            yield self._transfer(span, names, start, free + passage.latency_s)

    def _passage(self, sender: int, receiver: int) -> Passage | None:
        """What goes in or out of the tiles; None of what does neither."""
        ways: Mapping[tuple[int, int], Passage] = {
            (FEED, 0): self.passes.entering,
            (0, 1): self.passes.leaving,
            (1, 0): self.passes.returning,
        }
        return ways.get((sender, receiver))

    def _transfer(
        self, span: Span, names: tuple[str, str], start: float, end: float
    ) -> TimelineEntry:
        assert span.route is not None
        return TimelineEntry(
            kind=SENT[span.route.carries],
            device=names[0],
            stage=span.lane,
            micro_batch=span.micro_batch,
            start_seconds=start,
            end_seconds=end,
            receiver=names[1],
            free_seconds=end - span.route.latency_s,
        )
