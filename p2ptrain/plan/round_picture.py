"""The last rounds of a job as bars, device by device, and the round that the plan predicted. Pure.

spans of all devices --> the newest rounds of which every device has shown the end
                         --> bars of seven kinds; those of one kind that nearly touch are one
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, ClassVar, TypeAlias

from p2ptrain.errors import ProtocolError
from p2ptrain.net.fields import Blob, BlobLimit
from p2ptrain.net.forms import Count, Length, Range, Row, Seconds, Text
from p2ptrain.plan.types.timeline import TimelineEntry

KINDS = ("forward", "backward", "update", "sum", "send", "receive", "wait")

COMPUTING = 3
"""So many of them compute."""

ROUNDS_SHOWN = 2

DEVICES_SHOWN = 32

BARS_LIMIT = 4096

FINEST = 1 / 800
"""Of the picture: what is closer is one bar, where there are few devices."""

_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}

_KIND_OF = {
    "weight": "backward",
    "other": "update",
    "all-reduce": "sum",
    "exchange": "sum",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """What a device does for a while.

    Attributes:
        device: its number in the picture.
        kind: number in `KINDS`.
        start, end: seconds of the picture.
    """

    device: Annotated[int, Range(0, DEVICES_SHOWN - 1)]
    kind: Annotated[int, Range(0, len(KINDS) - 1)]
    start: Seconds
    end: Seconds


_Bars: TypeAlias = Annotated[tuple[Annotated[Bar, Row()], ...], Length(BARS_LIMIT)]


@dataclass(frozen=True, slots=True)
class PredictedRound(Blob):
    """As the plan was made.

    Attributes:
        seconds: from one round to the next.
        bars: of one round, from its own start.
    """

    seconds: Seconds
    bars: _Bars


@dataclass(frozen=True, slots=True)
class RoundPicture(Blob):
    """See the module.

    Attributes:
        devices: names.
        seconds: that the picture is long; 0 where no whole round was watched yet.
        starts: of its rounds; their numbers are `rounds`.
        predicted: None where the plan is not simulated: it was given, or has no rounds.
    """

    LIMIT: ClassVar[BlobLimit] = BlobLimit(1 << 20, 50_000)

    devices: Annotated[tuple[Annotated[str, Text(64, clean=True)], ...], Length(DEVICES_SHOWN)] = ()
    seconds: Seconds = 0.0
    rounds: Annotated[tuple[Count, ...], Length(ROUNDS_SHOWN)] = ()
    starts: Annotated[tuple[Seconds, ...], Length(ROUNDS_SHOWN)] = ()
    bars: _Bars = ()
    predicted: PredictedRound | None = None

    def check(self) -> None:
        """Raises ProtocolError: a bar of no device, or one that ends before it begins."""
        predicted = () if self.predicted is None else self.predicted.bars
        for bar in (*self.bars, *predicted):
            if bar.device >= len(self.devices) or bar.end < bar.start:
                raise ProtocolError("a bar of no device, or of no length")


@dataclass(slots=True)
class _WatchedRound:
    """What is known of one round: when it was computed, and where."""

    start: float = inf
    end: float = -inf
    devices: set[str] = field(default_factory=set)


def last_rounds(entries: Sequence[TimelineEntry], devices: Collection[str]) -> RoundPicture:
    """Of measured spans, by the names of the devices of the plan.

    Rounds of which the beginning was not watched are not shown, nor those under way.
    """
    names = tuple(devices)[:DEVICES_SHOWN]
    found: dict[int, _WatchedRound] = {}
    for entry in entries:
        if entry.round is None or entry.device not in devices or _number(entry) >= COMPUTING:
            continue
        of = found.setdefault(entry.round, _WatchedRound())
        of.start, of.end = min(of.start, entry.start_seconds), max(of.end, entry.end_seconds)
        of.devices.add(entry.device)
    numbers = sorted(found)
    # the beginning of the first was not watched, the newest is under way
    whole = [n for n in numbers[1:-1] if found[n].devices >= set(devices)]
    shown = [n for n in whole if n > whole[-1] - ROUNDS_SHOWN]
    if not shown:
        return RoundPicture(names)
    begin, end = found[shown[0]].start, max(found[n].end for n in shown)
    return RoundPicture(
        names,
        end - begin,
        tuple(shown),
        tuple(found[n].start - begin for n in shown),
        _bars(entries, names, begin, end),
    )


def predicted_round(
    entries: Iterable[TimelineEntry], seconds: float, devices: Sequence[str]
) -> PredictedRound:
    """Of a simulated round."""
    shown = list(entries)
    begin = min((entry.start_seconds for entry in shown), default=0.0)
    end = max((entry.end_seconds for entry in shown), default=0.0)
    return PredictedRound(seconds, _bars(shown, devices[:DEVICES_SHOWN], begin, end))


def _number(entry: TimelineEntry) -> int:
    first = entry.kind.partition(" ")[0]
    return _NUMBERS[_KIND_OF.get(first, first)]


def _bars(
    entries: Iterable[TimelineEntry], devices: Sequence[str], begin: float, end: float
) -> tuple[Bar, ...]:
    numbers = {name: number for number, name in enumerate(devices)}
    spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for entry in entries:
        device = numbers.get(entry.device)
        if device is None or entry.end_seconds <= begin or entry.start_seconds >= end:
            continue
        span = max(entry.start_seconds, begin) - begin, min(entry.end_seconds, end) - begin
        spans.setdefault((device, _number(entry)), []).append(span)
    room = max(len(spans), 1)
    finest = (end - begin) * max(FINEST, room / BARS_LIMIT)
    return tuple(
        Bar(device, kind, round(start, 6), round(stop, 6))
        for (device, kind), of in sorted(spans.items())
        for start, stop in _joined(sorted(of), finest)
    )[:BARS_LIMIT]


def _joined(spans: Iterable[tuple[float, float]], finest: float) -> list[tuple[float, float]]:
    """Sorted spans; those that overlap, or have less between their starts, are one."""
    found: list[tuple[float, float]] = []
    for start, end in spans:
        if found and (start < found[-1][1] or start - found[-1][0] < finest):
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
