"""A simulated round as a picture: SVG text, readable in a browser and in a Markdown page.

    study-desktop  |0:0|0:1|0:2|  |0:0|...     a row a device: its forwards (light) and backwards
    stage 0        ==== ==== ====              (dark), hatched where it waits; below it, thin, what
    kitchen-laptop      |1:0|1:0|1:1|...       its uplink and its downlink carry
                   0        0.1        0.2 s

Pure, with the standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import groupby
from xml.sax.saxutils import escape

from p2ptrain.plan.gantt import style as look
from p2ptrain.plan.gantt.bars import Bar, Row, rows
from p2ptrain.plan.simulation.simulate import Simulation

MOST_TITLES = 4000
"""Charts of more bars have no words to show when pointed at: they would be most of the file."""
TICKS = 10

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def draw_gantt(simulation: Simulation, title: str = "", each: str = "round") -> str:
    """The chart of a simulation that has a timeline, as the text of an SVG file.

    Arguments:
        each: what `round_seconds` are the seconds of.
    """
    heading = _text(_heading(simulation, title, each))
    # What overlaps with the next round ends after this one.
    ends = (entry.end_seconds for entry in simulation.timeline)
    seconds = max(ends, default=simulation.round_seconds)
    scale = look.PLOT_WIDTH / seconds if seconds > 0 else 0.0
    shown = [row.merged() for row in rows(simulation.timeline, scale)]
    bars = sum(len(row.tasks) + len(row.uplink) + len(row.downlink) for row in shown)
    height = look.HEAD_HEIGHT + sum(map(_row_height, shown)) + look.AXIS_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {look.WIDTH} {height}" '
        f'width="{look.WIDTH}" height="{height}" role="img">',
        f"<title>{heading}</title>",
        f"<style>{look.style_sheet()}</style>{_IDLE}",
        f'<rect class="page" width="{look.WIDTH}" height="{height}"/>',
        f'<text class="head" x="{look.MARGIN}" y="24">{heading}</text>',
        *_legend({entry.kind for entry in simulation.timeline}),
        *_axis(seconds, scale, height - look.AXIS_HEIGHT),
        *_rows(shown, simulation, with_titles=bars <= MOST_TITLES),
        "</svg>",
    ]
    return "\n".join(parts)


_IDLE = (
    '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><line class="hatch" x1="0" y1="0" x2="0" y2="6" '
    'stroke-width="2"/></pattern></defs>'
)


def _heading(simulation: Simulation, title: str, each: str) -> str:
    rate = f"{simulation.samples_per_s:,.1f} samples/s"
    speed = f"{simulation.round_seconds:.4g} s a {each}, {rate}"
    return f"{title}: {speed}" if title else speed


def _legend(kinds: Set[str]) -> Iterator[str]:
    """What the colours and marks mean, in one line below the heading."""
    x, y = look.PLOT_LEFT, 38
    weights = ((("weight",), "weight gradients"),) if "weight" in kinds else ()
    exchanges = ((("exchange",), "halos, statistics"),) if "exchange" in kinds else ()
    entries = (
        (("f0", "f1", "f2"), "forward stage:micro-batch"),
        (("b0", "b1", "b2"), "its backward"),
        *weights,
        (("x",), "input sent"),
        *exchanges,
        (("reduce",), "all-reduce"),
        (("update",), "update"),
        (("many",), "many, too narrow"),
        (("wait",), "waiting"),
    )
    for styles, words in entries:
        for style in styles:
            yield f'<rect class="{style}" x="{x}" y="{y}" width="11" height="11"/>'
            x += 12
        yield f'<text class="dim" x="{x + 4}" y="{y + 10}">{words}</text>'
        x += 20 + round(len(words) * look.CHARACTER_WIDTH)
    end = look.WIDTH - look.MARGIN
    yield f'<text class="dim end" x="{end}" y="{look.HEAD_HEIGHT - 6}">busy</text>'


def _axis(seconds: float, scale: float, y: int) -> Iterator[str]:
    top = look.HEAD_HEIGHT
    for tick in ticks(seconds):
        x = _number(look.PLOT_LEFT + tick * scale)
        yield f'<line class="grid" x1="{x}" y1="{top}" x2="{x}" y2="{y}"/>'
        yield f'<text class="dim mid" x="{x}" y="{y + 16}">{tick:g}</text>'
    x_end = look.WIDTH - look.MARGIN
    yield f'<text class="dim end" x="{x_end}" y="{y + 16}">seconds</text>'


def ticks(seconds: float) -> list[float]:
    """Round times from 0 to `seconds`, some TICKS of them, 1, 2 or 5 times a power of ten apart."""
    if seconds <= 0:
        return [0.0]
    magnitude = 10.0 ** math.floor(math.log10(seconds / TICKS))
    step = next(f * magnitude for f in (1, 2, 5, 10) if f * magnitude * TICKS >= seconds)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(math.floor(seconds / step * (1 + 1e-12)) + 1)]


def _row_height(row: Row) -> int:
    network = 2 * (look.LINE_HEIGHT + 1) if row.has_network else 0
    return look.BAR_HEIGHT + network + look.ROW_GAP


def _rows(shown: Sequence[Row], simulation: Simulation, *, with_titles: bool) -> Iterator[str]:
    y = look.HEAD_HEIGHT
    for row in shown:
        yield f'<g transform="translate({look.PLOT_LEFT} {y})">'
        yield from _names(row, simulation)
        yield f'<rect class="wait" width="{look.PLOT_WIDTH}" height="{look.BAR_HEIGHT}"/>'
        yield from _bars(row.tasks, 0, look.BAR_HEIGHT, with_titles=with_titles)
        yield f'<rect class="edge" width="{look.PLOT_WIDTH}" height="{look.BAR_HEIGHT}"/>'
        if row.has_network:
            yield from _network(row, with_titles=with_titles)
        yield from (_update_mark(x) for x in row.updates)
        yield "</g>"
        y += _row_height(row)


def _names(row: Row, simulation: Simulation) -> Iterator[str]:
    """The device and its stages at the left, its busy share at the right."""
    title = f"<title>{_text(row.device)}</title>"
    left = -look.NAME_WIDTH
    yield f'<text x="{left}" y="12">{_text(_short(row.device))}{title}</text>'
    yield f'<text class="dim small" x="{left}" y="24">{_stages(row)}</text>'
    if row.device in simulation.busy_share:
        x = look.PLOT_WIDTH + look.BUSY_WIDTH
        share = simulation.busy_share[row.device]
        yield f'<text class="end" x="{x}" y="16">{share:.0%}</text>'


def _stages(row: Row) -> str:
    if not row.stages:
        return "feeds only"
    numbers = ", ".join(map(str, sorted(row.stages)))
    return f"stage {numbers}" if len(row.stages) == 1 else f"stages {numbers}"


def _network(row: Row, *, with_titles: bool) -> Iterator[str]:
    """The uplink's and the downlink's thin rows; an all-reduce takes both."""
    top, height = look.BAR_HEIGHT + 1, look.LINE_HEIGHT
    for words, bars in (("sends", row.uplink), ("receives", row.downlink)):
        yield f'<rect class="line" y="{top}" width="{look.PLOT_WIDTH}" height="{height}"/>'
        yield f'<text class="dim end" style="font-size:8px" x="-4" y="{top + 7}">{words}</text>'
        yield from _bars(bars, top, height, with_titles=with_titles)
        top += height + 1
    yield from _bars(row.reduces, look.BAR_HEIGHT + 1, 2 * height + 1, with_titles=True)


def _bars(bars: Sequence[Bar], y: int, height: int, *, with_titles: bool) -> Iterator[str]:
    if with_titles:
        for bar in bars:
            title = f"<title>{_text(bar.title)}</title>" if bar.title else ""
            yield f'<path{_style(bar)} d="{_outline(bar, y, height)}">{title}</path>'
    else:
        for style, alike in groupby(sorted(bars, key=_style), key=_style):
            outlines = "".join(_outline(bar, y, height) for bar in alike)
            yield f'<path{style} d="{outlines}"/>'
    if height > look.LINE_HEIGHT:
        yield from _labels(bars, y + height / 2 + 3.5)


def _style(bar: Bar) -> str:
    opacity = "" if bar.opacity >= 1 else f' fill-opacity="{bar.opacity:g}"'
    return f' class="{bar.style}"{opacity}'


def _outline(bar: Bar, y: int, height: int) -> str:
    # At least a fifth of a pixel, or a single very short task would vanish.
    width = _number(max(bar.right - bar.left, 0.2))
    return f"M{_number(bar.left)} {y}h{width}v{height}h-{width}z"


def _labels(bars: Iterable[Bar], y: float) -> Iterator[str]:
    for bar in bars:
        room = (bar.right - bar.left - 2) / look.CHARACTER_WIDTH
        label = next((label for label in bar.label if len(label) <= room), None)
        if label is not None:
            style = "on-f" if bar.style.startswith("f") else "on-b"
            x = _number((bar.left + bar.right) / 2)
            yield f'<text class="{style}" x="{x}" y="{_number(y)}">{label}</text>'


def _update_mark(x: float) -> str:
    """A small triangle above the row and a thin line through it."""
    line = f"M{_number(x - 0.5)} 0h1v{look.BAR_HEIGHT}h-1z"
    return (
        f'<path class="update" d="M{_number(x)} 0l-4 -6h8z"><title>update</title></path>'
        f'<path class="update" fill-opacity="0.5" d="{line}"/>'
    )


def _short(name: str) -> str:
    most = round((look.NAME_WIDTH - 8) / (look.CHARACTER_WIDTH + 0.8))
    return name if len(name) <= most else name[: most - 1] + "…"


def _text(words: str) -> str:
    """`words` as the text of an XML element; what XML cannot hold becomes a replacement mark."""
    return escape(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", words))


def _number(value: float) -> str:
    """In a hundredth of a pixel, as short as it can be written."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
