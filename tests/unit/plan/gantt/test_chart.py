"""The Gantt chart: valid XML that shows every device, task and mark, whatever their names."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from p2ptrain.plan.allocation import Allocation
from p2ptrain.plan.cluster import Cluster, Link
from p2ptrain.plan.gantt.bars import LONGEST_RUN, Bar, merged, rows
from p2ptrain.plan.gantt.chart import draw_gantt, ticks
from p2ptrain.plan.gantt.style import PLOT_WIDTH
from p2ptrain.plan.plan import DeviceShare, LeftOut, Plan, PlannedStage, Predicted
from p2ptrain.plan.profile import Profile
from p2ptrain.plan.simulation.simulate import Simulation, simulate
from p2ptrain.plan.split import BatchSplit
from tests.thorough import examples_of
from tests.unit.plan import examples

SVG = "{http://www.w3.org/2000/svg}"


def drawn(simulation: Simulation, title: str = "") -> ElementTree.Element:
    return ElementTree.fromstring(draw_gantt(simulation, title))


def words(chart: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in chart.iter(f"{SVG}text")]


def titles(chart: ElementTree.Element) -> list[str]:
    return [title.text or "" for title in chart.iter(f"{SVG}title")]


def straight(*names: str, micro_batches: int = 4) -> Simulation:
    """One unit of a second forward, two backward, on each device."""
    split = BatchSplit(micro_batches, 1)
    cluster = examples.cluster(*names, link=Link(10.0, 0.0))
    profile = examples.profile([(1.0, 2.0)] * len(names), input_bytes=1, target_bytes=1)
    stages = ((name, (i, i + 1), len(names) - i) for i, name in enumerate(names))
    return simulate(examples.straight_plan(split, *stages), profile, cluster)


def grouped() -> Simulation:
    stages = (
        PlannedStage((0, 1), (DeviceShare("a", 2), DeviceShare("b", 2)), 3),
        PlannedStage(
            (1, 2), (DeviceShare("c", 2), DeviceShare("d", 1)), 2, Allocation.MICRO_BATCHES
        ),
    )
    plan = Plan("hand", BatchSplit(10, 4), stages, Predicted(0.0, 0.0, {}))
    profile = examples.profile([(1.0, 2.0)] * 2, parameter_bytes=2000)
    return simulate(plan, profile, examples.cluster(*"abcd", link=Link(100.0, 0.0)))


def test_a_round_has_its_title_devices_and_tasks() -> None:
    simulation = straight("laptop", "pi")
    chart = drawn(simulation, "digits")
    shown = words(chart)
    assert f"digits: {simulation.round_seconds:.4g} s a round" in shown[0]
    assert {"laptop", "pi", "stage 0", "stage 1", "seconds"} <= set(shown)
    assert shown.count(f"{simulation.busy_share['pi']:.0%}") >= 1
    tasks = [title for title in titles(chart) if "forward, micro" in title or "backward, " in title]
    assert len(tasks) == 2 * 2 * 4
    assert "pi, stage 1: backward, micro-batch 0, 2.1 to 4.1 s" in titles(chart)


def test_a_micro_batch_keeps_its_hue() -> None:
    [first, _] = rows(straight("a", "b").timeline, 10.0)
    styles = {bar.label[0]: bar.style for bar in first.tasks if "forward" in bar.title}
    backward = {bar.label[0]: bar.style for bar in first.tasks if "backward" in bar.title}
    assert styles == {"0:0": "f0", "0:1": "f1", "0:2": "f2", "0:3": "f3"}
    assert backward == {"0:0": "b0", "0:1": "b1", "0:2": "b2", "0:3": "b3"}


def test_bars_lie_at_their_times() -> None:
    [_, pi] = rows(straight("laptop", "pi").timeline, 10.0)
    starts = sorted((round(bar.left, 6), round(bar.right, 6)) for bar in pi.tasks)
    assert starts[:2] == [(11.0, 21.0), (21.0, 41.0)]  # the output takes 0.1 s
    assert [round(x, 6) for x in pi.updates] == [starts[-1][1]]


def test_transfers_stand_in_both_ends_rows() -> None:
    laptop, pi = rows(straight("laptop", "pi").timeline, 10.0)
    assert len(laptop.uplink) == len(pi.downlink) == 8  # four targets, four outputs
    assert len(laptop.downlink) == len(pi.uplink) == 4


def test_a_holder_without_a_stage_feeds() -> None:
    alone = examples.straight_plan(BatchSplit(2, 1), ("b", (0, 1), 1))
    simulation = simulate(
        replace(alone, left_out=(LeftOut("a", "it only feeds"),)),
        examples.profile([(1.0, 1.0)], input_bytes=10),
        examples.cluster("a", "b", link=Link(10.0, 0.0)),
    )
    assert "feeds only" in words(drawn(simulation))


def test_all_reduces_and_updates_are_marked() -> None:
    chart = drawn(grouped())
    assert words(chart).count("all-reduce") == 1 + 4  # the legend's and each device's
    assert titles(chart).count("update") == 4


def test_names_are_escaped_and_shortened() -> None:
    name = '<script>&"alert\x07 \ud800' + "x" * 60
    chart = drawn(straight(name, "b"), title="a < b & c")
    assert words(chart)[0].startswith("a < b & c: ")
    assert any(word.startswith("<script>&") and word.endswith("…") for word in words(chart))
    assert any("alert\N{REPLACEMENT CHARACTER}" in title for title in titles(chart))


def test_a_round_without_time_is_drawn_too() -> None:
    split = BatchSplit(2, 1)
    profile = examples.profile([(0.0, 0.0)])
    plan = examples.straight_plan(split, ("a", (0, 1), 1))
    drawn(simulate(plan, profile, examples.cluster("a")))


@settings(derandomize=True, deadline=None, max_examples=examples_of(5))
@given(examples.profiles(most_units=3), examples.clusters(most_devices=1, tight=False))
def test_any_chart_is_xml(profile: Profile, cluster: Cluster) -> None:
    plan = examples.straight_plan(
        BatchSplit(5, 2), (cluster.holder.name, (0, len(profile.units)), 1)
    )
    drawn(simulate(plan, profile, cluster))


def test_long_rounds_of_many_devices_stay_small() -> None:
    names = [f"device{i}" for i in range(20)]
    text = draw_gantt(straight(*names, micro_batches=512))
    assert len(text) < 1_200_000
    ElementTree.fromstring(text)


def test_narrow_neighbours_become_one_bar_as_pale_as_they_wait() -> None:
    [joined] = merged([Bar(0.4 * i, 0.4 * i + 0.2, "f0") for i in range(10)])
    assert (joined.left, round(joined.right, 6), joined.style) == (0, 3.8, "many")
    assert joined.opacity == 0.5
    assert joined.label == ()


def test_wide_bars_and_lonely_narrow_ones_stay() -> None:
    bars = [Bar(0, 5, "f0"), Bar(5, 5.5, "b0"), Bar(20, 20.5, "f1"), Bar(40, 42, "b1")]
    assert merged(bars) == bars


def test_joined_bars_end_where_waiting_could_hide() -> None:
    joined = merged([Bar(0.1 * i, 0.1 * i + 0.1, "f0") for i in range(300)])
    assert len(joined) == pytest.approx(30 / LONGEST_RUN, abs=1)
    assert all(bar.right - bar.left <= LONGEST_RUN + 1e-9 for bar in joined)
    assert sum(bar.right - bar.left for bar in joined) == pytest.approx(30)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (1.0, [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
        (0.842, [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]),
        (17.0, [0, 2, 4, 6, 8, 10, 12, 14, 16]),
        (3e-5, [0, 5e-6, 1e-5, 1.5e-5, 2e-5, 2.5e-5, 3e-5]),
        (0.0, [0]),
    ],
)
def test_ticks_are_round_times(seconds: float, expected: list[float]) -> None:
    assert ticks(seconds) == pytest.approx(expected)


def test_bars_end_within_the_plot() -> None:
    simulation = grouped()
    scale = PLOT_WIDTH / simulation.round_seconds
    for row in rows(simulation.timeline, scale):
        for bar in (*row.tasks, *row.uplink, *row.downlink, *row.reduces):
            assert 0 <= bar.left <= bar.right <= PLOT_WIDTH + 1e-6
