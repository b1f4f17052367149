"""Loss and accuracy against epochs and against seconds, as SVG drawn by hand.

No library, and the same file from the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_COLORS = ("#202124", "#9aa0a6", "#1f6f8b", "#c0392b", "#2e8b57", "#8fbc5a")
_WIDTH, _HEIGHT = 400, 230
_LEFT, _TOP, _BOTTOM, _LEGEND = 52, 26, 40, 30
_LEAST_ACCURACY = 0.8
_MOST_LOSS = 1.0


@dataclass(frozen=True)
class Line:
    """A setting: seconds of an epoch, and what was found after each."""

    name: str
    epoch_seconds: float
    loss: Sequence[float]
    accuracy: Sequence[float]


@dataclass(frozen=True)
class Axis:
    """From `least` to `most`, at `ticks`; pixels from `start` to `end`."""

    least: float
    most: float
    ticks: Sequence[float]
    start: float
    end: float

    def at(self, value: float) -> float:
        """Pixels; what lies outside is drawn at the border."""
        inside = min(max(value, self.least), self.most)
        return self.start + (inside - self.least) / (self.most - self.least) * (
            self.end - self.start
        )


def draw(lines: Sequence[Line]) -> str:
    """Four panels: loss above, accuracy below; epochs on the left, seconds on the right."""
    width, height = 2 * _WIDTH, _LEGEND + 2 * _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_legend(lines),
    ]
    longest = max(line.epoch_seconds * len(line.loss) for line in lines)
    for column, timed in enumerate((False, True)):
        most = longest if timed else float(max(len(line.loss) for line in lines))
        for row, what in enumerate(("loss", "accuracy")):
            parts += _panel(lines, (column, row), most, what, timed=timed)
    return "\n".join([*parts, "</svg>", ""])


def _legend(lines: Sequence[Line]) -> Iterator[str]:
    for index, (line, color) in enumerate(zip(lines, _COLORS, strict=False)):
        x = 8 + 112 * index
        yield f'<rect x="{x}" y="8" width="10" height="10" fill="{color}"/>'
        yield f'<text x="{x + 14}" y="17">{escape(line.name)}</text>'


def _panel(
    lines: Sequence[Line], place: tuple[int, int], most: float, what: str, *, timed: bool
) -> Iterator[str]:
    left, top = place[0] * _WIDTH + _LEFT, _LEGEND + place[1] * _HEIGHT + _TOP
    right, bottom = left + _WIDTH - _LEFT - 12, top + _HEIGHT - _TOP - _BOTTOM
    across = Axis(0.0, most, [most * k / 4 for k in range(5)], left, right)
    least, highest = (0.0, _MOST_LOSS) if what == "loss" else (_LEAST_ACCURACY, 1.0)
    up = Axis(least, highest, [least + (highest - least) * k / 4 for k in range(5)], bottom, top)
    for tick in up.ticks:
        y = up.at(tick)
        yield f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.2f}</text>'
    for tick in across.ticks:
        x = across.at(tick)
        yield f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{tick:.0f}</text>'
    yield f'<text x="{left}" y="{top - 8}">{what}</text>'
    unit = "seconds (simulated)" if timed else "epochs"
    yield f'<text x="{right}" y="{bottom + 28}" text-anchor="end">{unit}</text>'
    for line, color in zip(lines, _COLORS, strict=False):
        values = line.loss if what == "loss" else line.accuracy
        each = line.epoch_seconds if timed else 1.0
        points = " ".join(
            f"{across.at((epoch + 1) * each):.1f},{up.at(value):.1f}"
            for epoch, value in enumerate(values)
        )
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"/>'
