"""The Gantt chart: valid XML that shows every device, task and mark, whatever their names."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from hypothesis import given, settings

from p2ptrain.plan.gantt import PLOT_WIDTH, draw_gantt
from p2ptrain.plan.simulation.simulate import Simulation, simulate
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterLink
from p2ptrain.plan.types.plan import DeviceShare, LeftOut, Plan, PlannedStage, Predicted
from p2ptrain.plan.types.profile import Profile
from tests.support import planning_examples
from tests.support.thorough import examples_of

SVG = "{http://www.w3.org/2000/svg}"


def drawn(simulation: Simulation, title: str = "") -> ElementTree.Element:
    return ElementTree.fromstring(draw_gantt(simulation, title))


def words(chart: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in chart.iter(f"{SVG}text")]


def bars(chart: ElementTree.Element) -> list[tuple[str, str, float, float]]:
    """(words, style, left, right) of every bar."""
    found = []
    for rect in chart.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None:
            left = float(rect.get("x", "0"))
            right = left + float(rect.get("width", "0"))
            found.append((title.text or "", rect.get("class") or "", left, right))
    return found


def straight(*names: str, micro_batches: int = 4) -> Simulation:
    """One unit of a second forward, two backward, on each device."""
    split = BatchSplit(micro_batches, 1)
    cluster = planning_examples.cluster(*names, link=ClusterLink(10.0, 0.0))
    profile = planning_examples.profile([(1.0, 2.0)] * len(names), input_bytes=1, target_bytes=1)
    stages = ((name, (i, i + 1), len(names) - i) for i, name in enumerate(names))
    return simulate(planning_examples.straight_plan(split, *stages), profile, cluster)


def grouped() -> Simulation:
    stages = (
        PlannedStage((0, 1), (DeviceShare("a", 2), DeviceShare("b", 2)), 3),
        PlannedStage(
            (1, 2), (DeviceShare("c", 2), DeviceShare("d", 1)), 2, Allocation.MICRO_BATCHES
        ),
    )
    plan = Plan("hand", BatchSplit(10, 4), stages, Predicted(0.0, 0.0, {}))
    profile = planning_examples.profile([(1.0, 2.0)] * 2, parameter_bytes=2000)
    return simulate(plan, profile, planning_examples.cluster(*"abcd", link=ClusterLink(100.0, 0.0)))


def test_a_round_has_its_title_devices_and_tasks() -> None:
    simulation = straight("laptop", "pi")
    chart = drawn(simulation, "digits")
    shown = words(chart)
    assert f"digits: {simulation.round_seconds:.4g} s a round" in shown[0]
    assert {"laptop", "pi", "stage 0", "stage 1", "seconds"} <= set(shown)
    assert shown.count(f"{simulation.busy_share['pi']:.0%}") >= 1
    titles = [title for title, *_ in bars(chart)]
    tasks = [title for title in titles if "forward, micro" in title or "backward, " in title]
    assert len(tasks) == 2 * 2 * 4
    assert "pi, stage 1: backward, micro-batch 0, 2.1 to 4.1 s" in titles


def test_a_micro_batch_keeps_its_hue_and_a_bar_lies_at_its_time() -> None:
    simulation = straight("laptop", "pi")
    second = PLOT_WIDTH / max(entry.end_seconds for entry in simulation.timeline)
    found = [bar for bar in bars(drawn(simulation)) if bar[0].startswith("pi, stage 1: ")]
    tasks = [bar for bar in found if "ward, micro" in bar[0]]
    assert [style for title, style, *_ in tasks if "forward" in title] == ["f0", "f1", "f2", "f3"]
    assert [style for title, style, *_ in tasks if "backward" in title] == ["b0", "b1", "b2", "b3"]
    starts = sorted(
        (round(left / second, 2), round(right / second, 2)) for _, _, left, right in tasks
    )
    assert starts[:2] == [(1.1, 2.1), (2.1, 4.1)]  # the output takes 0.1 s


def test_transfers_stand_in_both_ends_rows() -> None:
    titles = [title for title, *_ in bars(drawn(straight("laptop", "pi")))]
    # four targets and four outputs there, four gradients back, each in two rows
    assert sum(": send " in title for title in titles) == 2 * 12


def test_a_holder_without_a_stage_feeds() -> None:
    alone = planning_examples.straight_plan(BatchSplit(2, 1), ("b", (0, 1), 1))
    simulation = simulate(
        replace(alone, left_out=(LeftOut("a", "it only feeds"),)),
        planning_examples.profile([(1.0, 1.0)], input_bytes=10),
        planning_examples.cluster("a", "b", link=ClusterLink(10.0, 0.0)),
    )
    assert "feeds only" in words(drawn(simulation))


def test_all_reduces_and_updates_are_marked() -> None:
    styles = [style for _, style, *_ in bars(drawn(grouped()))]
    assert styles.count("reduce") == 2 * 4, "each device's, both ways"
    assert styles.count("update") == 4


def test_names_are_escaped_and_shortened() -> None:
    name = '<script>&"alert\x07 \ud800' + "x" * 60
    chart = drawn(straight(name, "b"), title="a < b & c")
    assert words(chart)[0].startswith("a < b & c: ")
    assert any(word.startswith("<script>&") and word.endswith("…") for word in words(chart))
    assert any("alert\N{REPLACEMENT CHARACTER}" in title for title, *_ in bars(chart))


def test_a_round_without_time_is_drawn_too() -> None:
    profile = planning_examples.profile([(0.0, 0.0)])
    plan = planning_examples.straight_plan(BatchSplit(2, 1), ("a", (0, 1), 1))
    drawn(simulate(plan, profile, planning_examples.cluster("a")))


@settings(derandomize=True, deadline=None, max_examples=examples_of(5))
@given(
    planning_examples.profiles(most_units=3),
    planning_examples.clusters(most_devices=1, tight=False),
)
def test_any_chart_is_xml(profile: Profile, cluster: Cluster) -> None:
    plan = planning_examples.straight_plan(
        BatchSplit(5, 2), (cluster.holder.name, (0, len(profile.units)), 1)
    )
    drawn(simulate(plan, profile, cluster))


def test_bars_end_within_the_plot() -> None:
    for _, _, left, right in bars(drawn(grouped())):
        assert 0 <= left <= right <= PLOT_WIDTH + 0.01, "hundredths of a pixel are written"
