"""A simulated round as a picture: SVG text, readable in a browser and in a Markdown page.

    study-desktop  |0:0|0:1|0:2|  |0:0|...     a row a device: its forwards (light) and backwards
    stage 0        ==== ==== ====              (dark); below it, thin, what its uplink and its
    kitchen-laptop      |1:0|1:0|1:1|...       downlink carry
                   0        0.1        0.2 s

Pure, with the standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from colorsys import hls_to_rgb
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from p2ptrain.plan.simulation.simulate import Simulation
from p2ptrain.plan.types.timeline import TimelineEntry

WIDTH, NAME_WIDTH, BUSY_WIDTH, MARGIN = 1200, 162, 64, 12
"""Of the picture, and of its columns, in pixels."""

PLOT_WIDTH = WIDTH - NAME_WIDTH - BUSY_WIDTH - MARGIN

HEAD_HEIGHT, AXIS_HEIGHT, BAR_HEIGHT, LINE_HEIGHT, ROW_HEIGHT = 64, 30, 24, 7, 52

CHARACTER_WIDTH = 6.2
"""Of the bars' labels, on average."""

LONGEST_NAME = 20

TICKS = 10

HUES = 12
"""Micro-batches take turns; neighbours differ by 150 degrees."""

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_STYLES = {
    "weight": "#bf8700",
    "input": "#8c959f",
    "exchange": "#1b7c83",
    "reduce": "#8250df",
    "update": "#cf222e",
}

_SENT = {"send input": "input", "send output": "forward", "send gradient": "backward"}

_LEGEND: Mapping[str, str] = {
    "f0": "forward stage:micro-batch",
    "b0": "its backward",
    "weight": "weight gradients",
    "input": "input sent",
    "exchange": "halos, statistics",
    "reduce": "all-reduce",
    "update": "update",
}

_ONLY_WHERE_SHOWN = frozenset({"weight", "exchange"})


@dataclass(frozen=True, slots=True)
class _GanttRow:
    """What one device computes, and what its interface sends and receives."""

    tasks: list[TimelineEntry] = field(default_factory=list)
    sends: list[TimelineEntry] = field(default_factory=list)
    receives: list[TimelineEntry] = field(default_factory=list)
    stages: set[int] = field(default_factory=set)


def draw_gantt(simulation: Simulation, title: str = "", each: str = "round") -> str:
    """The chart of a simulation that has a timeline, as the text of an SVG file.

    Args:
        each: what `round_seconds` are the seconds of.
    """
    speed = f"{simulation.round_seconds:.4g} s a {each}, {simulation.samples_per_s:,.1f} samples/s"
    heading = _text(f"{title}: {speed}" if title else speed)
    # What overlaps with the next round ends after this one.
    ends = (entry.end_seconds for entry in simulation.timeline)
    seconds = max(ends, default=simulation.round_seconds)
    rows = _rows(simulation.timeline)
    height = HEAD_HEIGHT + ROW_HEIGHT * len(rows) + AXIS_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">',
        f"<title>{heading}</title><style>{_style_sheet()}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        f'<text class="head" x="{MARGIN}" y="24">{heading}</text>',
        *_legend({entry.kind for entry in simulation.timeline}),
        *_axis(seconds, height - AXIS_HEIGHT),
    ]
    for number, (device, row) in enumerate(rows):
        parts.append(f'<g transform="translate({NAME_WIDTH} {HEAD_HEIGHT + ROW_HEIGHT * number})">')
        parts += _drawn(device, row, PLOT_WIDTH / seconds if seconds > 0 else 0.0)
        share = simulation.busy_share.get(device)
        if share is not None:
            x = PLOT_WIDTH + BUSY_WIDTH
            parts.append(f'<text class="end" x="{x}" y="16">{share:.0%}</text>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"])


def _rows(timeline: Sequence[TimelineEntry]) -> list[tuple[str, _GanttRow]]:
    """By device, in the order of their first stages."""
    rows: dict[str, _GanttRow] = {}
    for entry in timeline:
        row = rows.setdefault(entry.device, _GanttRow())
        if entry.kind in _SENT:
            row.sends.append(entry)
            if entry.receiver is not None:
                rows.setdefault(entry.receiver, _GanttRow()).receives.append(entry)
            continue
        row.stages.add(entry.stage)
        if entry.kind in ("exchange", "all-reduce"):  # both ways at once
            row.sends.append(entry)
            row.receives.append(entry)
        else:
            row.tasks.append(entry)
    return sorted(rows.items(), key=lambda item: (min(item[1].stages, default=-1), item[0]))


def _drawn(device: str, row: _GanttRow, scale: float) -> Iterator[str]:
    short = device if len(device) <= LONGEST_NAME else device[: LONGEST_NAME - 1] + "…"
    left = MARGIN - NAME_WIDTH
    yield f'<text x="{left}" y="12">{_text(short)}<title>{_text(device)}</title></text>'
    yield f'<text class="dim" x="{left}" y="26">{_stages(row.stages)}</text>'
    yield f'<rect class="line" width="{PLOT_WIDTH}" height="{BAR_HEIGHT}"/>'
    for entry in row.tasks:
        yield _bar(entry, scale, 0, BAR_HEIGHT)
        yield from _label(entry, scale)
    top = BAR_HEIGHT + 1
    for words, carried in (("sends", row.sends), ("receives", row.receives)):
        yield f'<rect class="line" y="{top}" width="{PLOT_WIDTH}" height="{LINE_HEIGHT}"/>'
        yield f'<text class="dim end small" x="-4" y="{top + 7}">{words}</text>'
        yield from (_bar(entry, scale, top, LINE_HEIGHT) for entry in carried)
        top += LINE_HEIGHT + 1


def _stages(stages: Set[int]) -> str:
    if not stages:
        return "feeds only"
    return ("stage " if len(stages) == 1 else "stages ") + ", ".join(map(str, sorted(stages)))


def _bar(entry: TimelineEntry, scale: float, y: int, height: int) -> str:
    left, right = _span(entry, scale)
    # A single very short task would vanish; an update may take no time at all.
    width = max(right - left, 1.0 if entry.kind == "update" else 0.2)
    left = max(right - width, 0.0)  # it ends where the plot does
    return (
        f'<rect class="{_style(entry)}" x="{_number(left)}" y="{y}" width="{_number(width)}" '
        f'height="{height}"><title>{_title(entry)}</title></rect>'
    )


def _label(entry: TimelineEntry, scale: float) -> Iterator[str]:
    left, right = _span(entry, scale)
    label = "" if entry.micro_batch is None else f"{entry.stage}:{entry.micro_batch}"
    if label and len(label) * CHARACTER_WIDTH < right - left - 2:
        dark = "" if entry.kind == "forward" else " light"
        middle = _number((left + right) / 2)
        yield f'<text class="mid small{dark}" x="{middle}" y="15">{label}</text>'


def _span(entry: TimelineEntry, scale: float) -> tuple[float, float]:
    """Pixels of its beginning and its end."""
    end = entry.end_seconds if entry.free_seconds is None else entry.free_seconds
    return entry.start_seconds * scale, end * scale


def _style(entry: TimelineEntry) -> str:
    kind = _SENT.get(entry.kind, entry.kind)
    if kind in ("forward", "backward") and entry.micro_batch is not None:
        return f"{kind[0]}{entry.micro_batch % HUES}"
    return {"all-reduce": "reduce"}.get(kind, kind)


def _title(entry: TimelineEntry) -> str:
    what = entry.kind if entry.receiver is None else f"{entry.kind} to {entry.receiver}"
    piece = "" if entry.micro_batch is None else f", micro-batch {entry.micro_batch}"
    times = f"{entry.start_seconds:.4g} to {entry.end_seconds:.4g} s"
    return _text(f"{entry.device}, stage {entry.stage}: {what}{piece}, {times}")


def _legend(kinds: Set[str]) -> Iterator[str]:
    """What the colours mean, in one line below the heading."""
    x = NAME_WIDTH
    for style, words in _LEGEND.items():
        if style in _ONLY_WHERE_SHOWN and style not in kinds:
            continue
        yield f'<rect class="{style}" x="{x}" y="38" width="11" height="11"/>'
        yield f'<text class="dim" x="{x + 16}" y="48">{words}</text>'
        x += 36 + round(len(words) * CHARACTER_WIDTH)
    yield f'<text class="dim end" x="{WIDTH - MARGIN}" y="{HEAD_HEIGHT - 6}">busy</text>'


def _axis(seconds: float, bottom: int) -> Iterator[str]:
    for tick in range(TICKS + 1):
        x = _number(NAME_WIDTH + tick / TICKS * PLOT_WIDTH)
        yield f'<path class="grid" d="M{x} {HEAD_HEIGHT}V{bottom}"/>'
        label = f"{seconds * tick / TICKS:.3g}"
        yield f'<text class="dim mid" x="{x}" y="{bottom + 16}">{label}</text>'
    yield f'<text class="dim end" x="{WIDTH - MARGIN}" y="{bottom + 16}">seconds</text>'


def _style_sheet() -> str:
    colours = dict(_STYLES)
    for i in range(HUES):
        colours |= {f"f{i}": _colour(i, 0.72, 0.7), f"b{i}": _colour(i, 0.4, 0.6)}
    return (
        "text{font:12px system-ui,sans-serif;fill:#1f2328}.page{fill:#fff}.head{font-size:15px}"
        ".dim{fill:#59636e}.end{text-anchor:end}.mid{text-anchor:middle}.small{font-size:9px}"
        ".light{fill:#fff}.line{fill:#eef1f4}.grid{stroke:#8c959f;stroke-opacity:.3}"
    ) + "".join(f".{style}{{fill:{colour}}}" for style, colour in colours.items())


def _colour(number: int, lightness: float, saturation: float) -> str:
    rgb = hls_to_rgb((210 + 150 * number) % 360 / 360, lightness, saturation)
    return "#" + "".join(f"{round(255 * value):02x}" for value in rgb)


def _text(words: str) -> str:
    """`words` as the text of an XML element; what XML cannot hold becomes a replacement mark."""
    return escape(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", words))


def _number(value: float) -> str:
    """In a hundredth of a pixel, as short as it can be written."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
