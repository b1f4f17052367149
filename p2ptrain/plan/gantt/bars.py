"""From a timeline to bars: which row shows what, and how bars too narrow to see become one.

A row of 960 pixels cannot show 1,024 tasks. Neighbours narrower than a pixel are drawn as one bar,
as opaque as the part of its width that they fill, so that waiting still shows as paleness and a
chart of any plan has a bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from p2ptrain.plan.gantt.style import backward_style, forward_style
from p2ptrain.plan.simulation.simulate import TimelineEntry

NARROW = 1.0
"""Pixels below which a bar is drawn together with its neighbours."""
LONGEST_RUN = 6.0
"""Pixels of such a bar at most, so that its paleness says where the waiting is."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from pixel `left` to pixel `right`.

    Attributes:
        style: its class in the style sheet.
        opacity: below 1 where it stands for several with gaps between.
        label: shown inside where there is room, the long form first; empty = none.
        title: shown by a browser when pointed at.
    """

    left: float
    right: float
    style: str
    label: tuple[str, ...] = ()
    title: str = ""
    opacity: float = 1.0


@dataclass(slots=True)
class Row:
    """What one device does.

    Attributes:
        tasks: what it computes. updates: the pixels at which it updates its weights.
        uplink, downlink: what its interface carries. reduces: its all-reduces.
        stages: those it has a part in.
    """

    device: str
    tasks: list[Bar] = field(default_factory=list)
    uplink: list[Bar] = field(default_factory=list)
    downlink: list[Bar] = field(default_factory=list)
    reduces: list[Bar] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    stages: set[int] = field(default_factory=set)

    @property
    def has_network(self) -> bool:
        """Whether its interface is used."""
        return bool(self.uplink or self.downlink or self.reduces)

    def merged(self) -> Row:
        """The same with narrow bars drawn together."""
        return replace(
            self,
            tasks=merged(self.tasks),
            uplink=merged(self.uplink),
            downlink=merged(self.downlink),
        )


def rows(timeline: Sequence[TimelineEntry], pixels_per_second: float) -> list[Row]:
    """A row for every device in the timeline, in the order of their first stages."""
    by_device: dict[str, Row] = {}
    for entry in timeline:
        _place(entry, by_device, pixels_per_second)
    return sorted(by_device.values(), key=lambda row: (min(row.stages, default=-1), row.device))


def merged(bars: Sequence[Bar]) -> list[Bar]:
    """`bars`, by their left ends, those narrower than a pixel joined with their neighbours."""
    done: list[Bar] = []
    run: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: bar.left):
        narrow = bar.right - bar.left < NARROW
        if run and not (narrow and _joins(run, bar)):
            done.append(_joined(run))
            run = []
        if narrow:
            run.append(bar)
        else:
            done.append(bar)
    return [*done, _joined(run)] if run else done


def _joins(run: Sequence[Bar], bar: Bar) -> bool:
    return bar.left - run[-1].right < NARROW and bar.right - run[0].left <= LONGEST_RUN


def _joined(run: Sequence[Bar]) -> Bar:
    if len(run) == 1:
        return run[0]
    left, right = run[0].left, max(bar.right for bar in run)
    filled = sum(bar.right - bar.left for bar in run)
    # A quarter is the palest that is told from an idle row.
    opacity = max(0.25, round(filled / (right - left), 1)) if right > left else 1.0
    return Bar(left, right, "many", (), f"{len(run)} in a row", opacity)


def _place(entry: TimelineEntry, by_device: dict[str, Row], pixels_per_second: float) -> None:
    row = by_device.setdefault(entry.device, Row(entry.device))
    if entry.kind in _TRANSFERS:
        bar = _bar(entry, _TRANSFERS[entry.kind], pixels_per_second)
        row.uplink.append(bar)
        if entry.receiver is not None:
            by_device.setdefault(entry.receiver, Row(entry.receiver)).downlink.append(bar)
        return
    row.stages.add(entry.stage)
    if entry.kind == "exchange":  # both ways at once
        bar = _bar(entry, "exchange", pixels_per_second)
        row.uplink.append(bar)
        row.downlink.append(bar)
    elif entry.kind == "update":
        row.updates.append(entry.end_seconds * pixels_per_second)
        if entry.end_seconds > entry.start_seconds:
            row.tasks.append(_bar(entry, "update", pixels_per_second))
    elif entry.kind == "all-reduce":
        row.reduces.append(_bar(entry, "reduce", pixels_per_second))
    else:
        row.tasks.append(_bar(entry, entry.kind, pixels_per_second))


_TRANSFERS: Mapping[str, str] = {
    "send input": "input",
    "send output": "forward",
    "send gradient": "backward",
}


def _bar(entry: TimelineEntry, looks: str, pixels_per_second: float) -> Bar:
    end = entry.end_seconds if entry.free_seconds is None else entry.free_seconds
    return Bar(
        left=entry.start_seconds * pixels_per_second,
        right=end * pixels_per_second,
        style=_style(entry, looks),
        label=tuple(_labels(entry)),
        title=_title(entry),
    )


def _style(entry: TimelineEntry, looks: str) -> str:
    if looks == "forward":
        return forward_style(entry.micro_batch)
    if looks == "backward":
        return backward_style(entry.micro_batch)
    return looks if looks in ("reduce", "update", "weight", "exchange") else "x"


def _labels(entry: TimelineEntry) -> Iterator[str]:
    if entry.kind == "all-reduce":
        yield from ("all-reduce", "sum")
    elif entry.micro_batch is not None:
        yield f"{entry.stage}:{entry.micro_batch}"
        yield str(entry.micro_batch)


def _title(entry: TimelineEntry) -> str:
    what = entry.kind if entry.receiver is None else f"{entry.kind} to {entry.receiver}"
    piece = "" if entry.micro_batch is None else f", micro-batch {entry.micro_batch}"
    times = f"{entry.start_seconds:.4g} to {entry.end_seconds:.4g} s"
    return f"{entry.device}, stage {entry.stage}: {what}{piece}, {times}"
