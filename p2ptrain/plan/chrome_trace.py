"""A timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process a device, in it one row each for what it computes, sends, receives, sums and waits for,
and more where bars of a kind overlap; arrows from what is sent to what is received. The format:
"Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

Pure, with the standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from p2ptrain.plan.types.timeline import TimelineEntry

TraceEvent: TypeAlias = Mapping[str, Any]

_ROWS = ("compute", "send", "receive", "sum", "wait")

_SUMS = frozenset({"all-reduce", "exchange"})

_LANES = 1000
"""Rows of one kind at most; threads of a process are numbered by kind and lane."""


def simulated_transfers(timeline: Iterable[TimelineEntry]) -> Iterator[TimelineEntry]:
    """A simulated timeline, with what is sent as received too."""
    for entry in timeline:
        yield entry
        if entry.receiver is not None:
            yield replace(
                entry,
                kind=entry.kind.replace("send", "receive", 1),  # type: ignore[arg-type]
                device=entry.receiver,
                sender=entry.device,
                receiver=None,
                free_seconds=None,
            )


def trace_text(
    entries: Callable[[], Iterable[TimelineEntry]],
    devices: Sequence[str],
    other: Mapping[str, Any],
) -> Iterator[str]:
    """A trace file, piece by piece.

    Args:
        entries: each call gives all of them once more, those of one device by their starts.
        devices: names, in the order in which they are shown.
        other: what else the file says.
    """
    yield '{"displayTimeUnit": "ms", "otherData": '
    yield json.dumps(other)
    yield ', "traceEvents": ['
    before = ""
    for event in trace_events(entries, devices):
        yield before + json.dumps(event, separators=(",", ":"))
        before = ",\n"
    yield "]}\n"


def trace_events(
    entries: Callable[[], Iterable[TimelineEntry]], devices: Sequence[str]
) -> Iterator[TraceEvent]:
    """As `trace_text`; times begin with the first entry."""
    began = min((entry.start_seconds for entry in entries()), default=0.0)
    paired = _paired(entries())
    numbers = {name: number for number, name in enumerate(devices, 1)}
    rows: dict[str, _TraceRows] = {}
    for name, number in numbers.items():
        yield _named("process_name", number, 0, name)
        yield {**_head("process_sort_index", number, 0), "args": {"sort_index": number}}
    for entry in entries():
        number = numbers[entry.device]
        lanes = rows.setdefault(entry.device, _TraceRows())
        thread, is_new = lanes.place(entry)
        if is_new:
            row, lane = _ROWS[thread // _LANES], thread % _LANES
            yield _named("thread_name", number, thread, f"{row} {lane + 1}" if lane else row)
            yield {**_head("thread_sort_index", number, thread), "args": {"sort_index": thread}}
        yield from _events(entry, number, thread, began, paired)


class _TraceRows:
    """Where bars of one device stand: bars of one row do not overlap."""

    def __init__(self) -> None:
        self._ends: dict[int, list[float]] = {}  # of the last bar of each lane, by row

    def place(self, entry: TimelineEntry) -> tuple[int, bool]:
        """The thread of a bar, and whether it is a new one."""
        row = _row(entry)
        ends = self._ends.setdefault(row, [])
        for lane, end in enumerate(ends):
            if end <= entry.start_seconds or lane == _LANES - 1:
                ends[lane] = entry.end_seconds
                return row * _LANES + lane, False
        ends.append(entry.end_seconds)
        return row * _LANES + len(ends) - 1, True


def _row(entry: TimelineEntry) -> int:
    if entry.kind in _SUMS:
        return _ROWS.index("sum")
    first = entry.kind.split(" ", 1)[0]
    return _ROWS.index(first) if first in _ROWS else 0


@dataclass(frozen=True, slots=True)
class _Transfer:
    """What is sent, and received, once.

    Two entries with the same of it are of the same transfer, the first of each kind.
    """

    what: str
    stage: int
    round: int | None
    micro_batch: int | None
    sender: str
    receiver: str


def _transfer(entry: TimelineEntry) -> tuple[bool, int] | None:
    """Whether an entry sends, and what, as a number; None where it is no transfer."""
    does, _, what = entry.kind.partition(" ")
    if does == "send" and entry.receiver is not None:
        ends = (entry.device, entry.receiver)
    elif does == "receive" and entry.sender is not None:
        ends = (entry.sender, entry.device)
    else:
        return None
    transfer = _Transfer(what, entry.stage, entry.round, entry.micro_batch, *ends)
    return does == "send", hash(transfer) & 0xFFFF_FFFF_FFFF


def _paired(entries: Iterable[TimelineEntry]) -> Set[int]:
    """Transfers with both ends: of a device that has gone one may be missing."""
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for entry in entries:
        found = _transfer(entry)
        if found is not None:
            is_sent, number = found
            side = sent if is_sent else received
            side[number] = side.get(number, 0) + 1
    return {number for number, times in sent.items() if times == 1 == received.get(number)}


def _events(
    entry: TimelineEntry, process: int, thread: int, began: float, paired: Set[int]
) -> Iterator[TraceEvent]:
    start = _microseconds(entry.start_seconds - began)
    duration = round(_microseconds(entry.end_seconds - began) - start, 3)
    place = {"pid": process, "tid": thread}
    does, _, what = entry.kind.partition(" ")
    is_transfer = does in ("send", "receive")
    yield {
        "ph": "X",
        "name": what if is_transfer else _label(entry),
        "cat": does if what else entry.kind,
        **place,
        "ts": start,
        "dur": duration,
        "args": _details(entry),
    }
    found = _transfer(entry)
    if found is not None and found[1] in paired:
        is_sent, number = found
        arrow = {"cat": "transfer", "name": what, "id": number, **place}
        if is_sent:
            yield {"ph": "s", **arrow, "ts": start}
        else:
            yield {"ph": "f", "bp": "e", **arrow, "ts": round(start + duration / 2, 3)}


def _label(entry: TimelineEntry) -> str:
    if entry.kind.startswith("wait "):
        return f"wait for {entry.kind[5:]}"
    return entry.kind if entry.micro_batch is None else f"{entry.kind} {entry.micro_batch}"


def _details(entry: TimelineEntry) -> dict[str, Any]:
    found = {
        "stage": entry.stage,
        "round": entry.round,
        "micro_batch": entry.micro_batch,
        "to": entry.receiver,
        "from": entry.sender,
    }
    return {name: value for name, value in found.items() if value is not None}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _head(name: str, process: int, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread}


def _named(what: str, process: int, thread: int, name: str) -> TraceEvent:
    return {**_head(what, process, thread), "args": {"name": name}}
