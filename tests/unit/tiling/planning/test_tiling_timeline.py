"""The bars of a round in tiles: of one device none overlap, and they end when the round does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.gantt import draw_gantt
from p2ptrain.plan.simulation.simulate import group_of
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.timeline import TimelineEntry
from p2ptrain.tiling.planning.tiled_plan import simulate_plan
from tests.support.planning_examples import pieces as pieces_of
from tests.unit.tiling.planning.test_ends import house, tiled
from tests.unit.tiling.planning.test_sharing_behind import DEALING, DIVIDING, shared
from tests.unit.tiling.planning.test_tiled_plan import profile

DEVICES = house(4, {})
NET = replace(profile(tail=1.0), target_bytes=10**6)
COMPUTES = {"forward", "backward", "exchange", "all-reduce", "update"}

PLANS = [
    tiled(("d0", "d1"), ("d0",), BatchSplit(5, 2), out=("d2", "d3")),
    tiled(("d1", "d2"), ("d2",), BatchSplit(4, 2), out=("d0", "d3")),
    tiled(("d0", "d1", "d2"), ("d3",), BatchSplit(7, 2), depths=(3, 1)),
    tiled(("d1", "d2"), ("d3", "d0"), BatchSplit(6, 1), depths=(5, 3, 1)),
]
GROUPS = [
    shared(("d0", "d1"), ("d2", "d3"), (DEALING, (3, 1)), BatchSplit(7, 2), depths=(4, 2)),
    shared(("d0", "d1"), ("d2", "d3"), (DIVIDING, (1, 2)), BatchSplit(7, 3), depths=(3, 1)),
    shared(("d1", "d2"), ("d3", "d0"), (DIVIDING, (2, 1)), BatchSplit(9, 3), depths=(3, 1)),
]


def disjoint(spans: Iterable[tuple[float, float]]) -> bool:
    return all(one[1] <= other[0] + 1e-9 for one, other in pairwise(sorted(spans)))


def free(entry: TimelineEntry) -> float:
    return entry.end_seconds if entry.free_seconds is None else entry.free_seconds


@pytest.mark.parametrize("plan", [*PLANS, *GROUPS])
@pytest.mark.parametrize("overlap", [False, True])
def test_bars_of_a_device_do_not_overlap(plan: Plan, overlap: bool) -> None:
    found = simulate_plan(plan, NET, DEVICES, timeline=True, overlap=overlap)
    bars = found.timeline
    assert max(bar.end_seconds for bar in bars) == pytest.approx(found.round_seconds, rel=1e-12)
    assert found.round_seconds == simulate_plan(plan, NET, DEVICES, overlap=overlap).round_seconds
    for name in {device.name for stage in plan.stages for device in stage.devices}:
        own = [bar for bar in bars if bar.device == name and bar.kind in COMPUTES]
        assert disjoint((bar.start_seconds, bar.end_seconds) for bar in own)
        busy = sum(
            b.end_seconds - b.start_seconds for b in own if b.kind in ("forward", "backward")
        )
        assert busy == pytest.approx(found.busy_seconds[name])
        for sent in (
            [b for b in bars if b.device == name],
            [b for b in bars if b.receiver == name],
        ):
            carried = [b for b in sent if b.receiver is not None]
            assert disjoint((bar.start_seconds, free(bar)) for bar in carried)


@pytest.mark.parametrize("plan", PLANS)
def test_every_device_has_all_its_bars(plan: Plan) -> None:
    bars = simulate_plan(plan, NET, DEVICES, timeline=True).timeline
    pieces = set(range(plan.micro_batches))
    for p, stage in enumerate(plan.stages):
        for device in stage.devices:
            own = [bar for bar in bars if bar.device == device.name and bar.stage == p]
            for kind in ("forward", "backward", *(["exchange"] if p == 0 else [])):
                assert {bar.micro_batch for bar in own if bar.kind == kind} == pieces
            assert [bar.kind for bar in own].count("all-reduce") == (1 if p == 0 else 0)
            assert [bar.kind for bar in own].count("update") == 1
    tiles = {device.name for device in plan.stages[0].devices}
    behind = plan.stages[1].devices[0].name
    sent = {(bar.kind, bar.device, bar.receiver, bar.stage) for bar in bars}
    assert {("send input", "d0", name, 0) for name in tiles - {"d0"}} <= sent
    assert {("send output", name, behind, 1) for name in tiles - {behind}} <= sent
    assert {("send gradient", behind, name, 0) for name in tiles - {behind}} <= sent


@pytest.mark.parametrize("plan", GROUPS)
def test_devices_that_share_a_stage_have_bars_of_what_is_their_own(plan: Plan) -> None:
    bars = simulate_plan(plan, NET, DEVICES, timeline=True).timeline
    behind, split = plan.stages[1], plan.split
    group = group_of(CostModel(NET, DEVICES), behind)
    for place, device in enumerate(behind.devices):
        own = [bar for bar in bars if (bar.device, bar.stage) == (device.name, 1)]
        pieces = {m for m, samples in enumerate(pieces_of(group, split, place)) if samples}
        got = {
            sender.name: {
                bar.micro_batch
                for bar in bars
                if (bar.device, bar.receiver, bar.kind) == (sender.name, device.name, "send output")
            }
            for sender in plan.stages[0].devices
        }
        assert set(map(frozenset, got.values())) == {frozenset(pieces)}
        for kind in ("forward", "backward"):
            assert {bar.micro_batch for bar in own if bar.kind == kind} == pieces
        sent = [bar for bar in bars if (bar.device, bar.kind) == (device.name, "send gradient")]
        assert {bar.receiver for bar in sent} == {tile.name for tile in plan.stages[0].devices}
        assert {bar.micro_batch for bar in sent} == pieces
        (summed,) = [bar for bar in own if bar.kind == "all-reduce"]
        last = max(bar.end_seconds for bar in bars if (bar.kind, bar.stage) == ("backward", 1))
        assert summed.start_seconds == last
    assert [bar.kind for bar in bars if bar.stage == 1].count("update") == 2


def test_nothing_is_sent_before_it_is_there() -> None:
    bars = simulate_plan(PLANS[2], NET, DEVICES, timeline=True).timeline

    def ends(kind: str, piece: int, stage: int) -> list[TimelineEntry]:
        return [b for b in bars if (b.kind, b.micro_batch, b.stage) == (kind, piece, stage)]

    for piece in range(4):
        forward, sent = ends("forward", piece, 0), ends("send output", piece, 1)
        assert min(b.start_seconds for b in sent) >= max(b.end_seconds for b in forward) - 1e-9
        (behind,) = ends("forward", piece, 1)
        assert behind.start_seconds >= max(b.end_seconds for b in sent) - 1e-9
        images = ends("send input", piece, 0)
        assert min(b.start_seconds for b in forward) >= max(b.end_seconds for b in images) - 1e-9
        assert len(ends("send input", piece, 1)) == 1  # the target


def test_a_chart_shows_them() -> None:
    found = simulate_plan(PLANS[0], NET, DEVICES, timeline=True)
    chart = draw_gantt(found)
    assert "halos, statistics" in chart
    assert "stages 0, 1" in chart  # of the device with a tile and the rest
