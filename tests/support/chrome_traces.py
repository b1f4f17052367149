"""Checks a trace against the trace-event format, as Perfetto's importer reads it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True)
class CheckedTrace:
    """Attributes:
    processes: names by number.
    rows: names by (process, thread).
    bars: complete events.
    arrows: (process that sends, its bar; process that receives, its bar).
    other: what else the file says.
    """

    processes: Mapping[int, str]
    rows: Mapping[tuple[int, int], str]
    bars: Sequence[Event]
    arrows: Sequence[tuple[str, Event, str, Event]]
    other: Mapping[str, Any]

    def of(self, device: str, row: str) -> list[Event]:
        """The bars of a device's rows of that name."""
        return [
            bar
            for bar in self.bars
            if self.processes[bar["pid"]] == device
            and self.rows[bar["pid"], bar["tid"]].split(" ")[0] == row
        ]


def check_trace(text: str) -> CheckedTrace:
    """Raises AssertionError: an event lacks what its phase must have, bars of one row overlap, an
    arrow has one end or none of its ends in a bar."""
    whole = json.loads(text)
    assert isinstance(whole["traceEvents"], list)
    processes: dict[int, str] = {}
    rows: dict[tuple[int, int], str] = {}
    bars: list[Event] = []
    ends: dict[str, dict[int, Event]] = {"s": {}, "f": {}}
    for event in whole["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        match event["ph"]:
            case "M":
                if event["name"] == "process_name":
                    processes[event["pid"]] = event["args"]["name"]
                elif event["name"] == "thread_name":
                    rows[event["pid"], event["tid"]] = event["args"]["name"]
                else:
                    assert event["name"] in ("process_sort_index", "thread_sort_index")
            case "X":
                assert event["ts"] >= 0
                assert event["dur"] >= 0
                assert event["name"]
                bars.append(event)
            case "s" | "f" as end:
                assert event["id"] not in ends[end], "two arrows of one number"
                assert end == "s" or event["bp"] == "e"
                ends[end][event["id"]] = event
            case other:
                raise AssertionError(f"an event of phase {other}")
    lanes = defaultdict(list)
    for bar in bars:
        assert bar["pid"] in processes
        assert (bar["pid"], bar["tid"]) in rows
        lanes[bar["pid"], bar["tid"]].append(bar)
    for lane in lanes.values():
        lane.sort(key=lambda bar: bar["ts"])
        for before, after in pairwise(lane):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.0011, (before, after)
    assert ends["s"].keys() == ends["f"].keys(), "an arrow with one end"
    arrows = [
        (
            processes[start["pid"]],
            _around(lanes, start),
            processes[ends["f"][number]["pid"]],
            _around(lanes, ends["f"][number]),
        )
        for number, start in ends["s"].items()
    ]
    return CheckedTrace(processes, rows, bars, arrows, whole["otherData"])


def _around(lanes: Mapping[tuple[int, int], Sequence[Event]], end: Event) -> Event:
    for bar in lanes[end["pid"], end["tid"]]:
        if bar["ts"] <= end["ts"] <= bar["ts"] + bar["dur"]:
            return bar
    raise AssertionError(f"an arrow's end in no bar: {end}")
