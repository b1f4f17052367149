"""A timeline as a trace: what Perfetto takes, with all that is in the timeline."""

from __future__ import annotations

from dataclasses import replace

from p2ptrain.plan.chrome_trace import simulated_transfers, trace_text
from p2ptrain.plan.types.timeline import TimelineEntry
from tests.support.chrome_traces import CheckedTrace, check_trace
from tests.unit.plan.test_gantt import grouped


def written(*entries: TimelineEntry) -> CheckedTrace:
    devices = list(dict.fromkeys(entry.device for entry in entries))
    return check_trace("".join(trace_text(lambda: entries, devices, {"what": 'a "name"'})))


def test_a_simulated_round_has_every_task_and_an_arrow_for_each_transfer() -> None:
    timeline = grouped().timeline
    trace = written(*simulated_transfers(timeline))
    assert set(trace.processes.values()) == set("abcd")
    sent = [entry for entry in timeline if entry.receiver is not None]
    assert len(trace.bars) == len(timeline) + len(sent)
    assert len(trace.arrows) == len(sent) > 0
    ends = {(sender, receiver) for sender, _, receiver, _ in trace.arrows}
    assert ends == {(entry.device, entry.receiver) for entry in sent}
    assert [bar["name"] for bar in trace.of("c", "sum")] == ["all-reduce"]
    assert trace.other == {"what": 'a "name"'}


def test_bars_that_overlap_stand_in_rows_of_their_own() -> None:
    sends = [
        TimelineEntry("send output", "a", 1, number, start, start + 3.0, receiver="b", round=0)
        for number, start in enumerate((1.0, 2.0, 4.0))
    ]
    assert set(written(*sends).rows.values()) == {"send", "send 2"}


def test_a_transfer_with_one_end_and_one_made_twice_have_no_arrow() -> None:
    sent = TimelineEntry("send gradient", "a", 0, 4, 1.0, 2.0, receiver="b", round=7)
    came = TimelineEntry("receive gradient", "b", 0, 4, 1.5, 2.5, sender="a", round=7)
    assert len(written(sent, came).arrows) == 1
    assert not written(sent).arrows
    assert not written(sent, came, replace(came, start_seconds=3.0, end_seconds=3.5)).arrows
    assert not written(sent, replace(came, round=8)).arrows
