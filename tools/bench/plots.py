"""Bars of fractions of aggregate, one picture a household: systems side by side for each model.

Drawn as SVG by hand, as the Gantt charts are: no library, and the same file from the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tools.bench.cells import SYSTEMS
from tools.bench.fractions import Row

_COLORS = {
    "torch": "#9aa0a6",
    "ddp": "#c58b4e",
    "torch-pp": "#a5673f",
    "auto": "#1f6f8b",
    "hybrid": "#3f93ad",
    "pp": "#69b1c4",
    "dp": "#8fc7d3",
    "single": "#b9dde4",
    "pipedream": "#d3e9ed",
}
_BAR, _GAP, _HEIGHT = 14, 26, 220
_LEFT, _TOP, _BOTTOM = 48, 46, 46


def draw(known: Sequence[Row], stem: Path) -> list[Path]:
    """Write `STEM-HOUSEHOLD.svg` for each household with a measured figure; returns the files."""
    files = []
    for household in dict.fromkeys(row.household for row in known if row.measured):
        file = stem.with_name(f"{stem.name}-{household}.svg")
        own = [row for row in known if row.household == household and row.measured]
        file.write_text(chart(household, own), encoding="utf-8")
        files.append(file)
    return files


def chart(household: str, known: Sequence[Row]) -> str:
    """The picture of one household; a short line marks the target of each model and size."""
    systems = [name for name in SYSTEMS if any(name in row.measured for row in known)]
    width_of_one = _BAR * len(systems) + _GAP
    width = _LEFT + width_of_one * len(known) + 8
    inside = [*_scale(width), *_legend(systems)]
    for index, row in enumerate(known):
        inside += _bars(row, systems, _LEFT + index * width_of_one + _GAP / 2)
    height = _TOP + _HEIGHT + _BOTTOM
    width = max(width, _LEFT + 74 * len(systems) + 90)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height}" '
        f'font-family="sans-serif" font-size="11">'
    )
    title = f'<text x="4" y="14">household {escape(household)}: fraction of aggregate</text>'
    white = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, white, title, *inside, "</svg>", ""])


def _height(fraction: float) -> float:
    """Pixels from the top; all above 1.1 is cut off."""
    return _TOP + _HEIGHT * (1 - min(fraction, 1.1) / 1.1)


def _scale(width: float) -> Iterator[str]:
    for tenth in range(0, 11, 2):
        y = _height(tenth / 10)
        yield f'<line x1="{_LEFT}" x2="{width:g}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>'


def _legend(systems: Sequence[str]) -> Iterator[str]:
    for index, name in enumerate([*systems, "target"]):
        x = _LEFT + 74 * index
        color = _COLORS.get(name, "#c0392b")
        yield f'<rect x="{x}" y="22" width="10" height="10" fill="{color}"/>'
        yield f'<text x="{x + 14}" y="31">{escape(name)}</text>'


def _bars(row: Row, systems: Sequence[str], left: float) -> Iterator[str]:
    floor = _height(0)
    for index, name in enumerate(systems):
        if name in row.measured:
            top = _height(row.measured[name])
            yield (
                f'<rect x="{left + index * _BAR:g}" y="{top:.1f}" width="{_BAR - 2}" '
                f'height="{floor - top:.1f}" fill="{_COLORS[name]}">'
                f"<title>{escape(name)} {row.measured[name]:.2f}</title></rect>"
            )
    right = left + _BAR * len(systems)
    if row.target is not None:
        y = _height(row.target)
        yield (
            f'<line x1="{left - 4:g}" x2="{right + 2:g}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="#c0392b" stroke-width="2"/>'
        )
    middle = (left + right) / 2
    yield f'<text x="{middle:g}" y="{floor + 16:.1f}" text-anchor="middle">{row.model}</text>'
    yield f'<text x="{middle:g}" y="{floor + 30:.1f}" text-anchor="middle">{row.size}</text>'
