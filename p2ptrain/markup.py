"""Small static HTML for notebooks: a table, a curve. All text is escaped; nothing is fetched."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

_CELL = "text-align:left;padding:2px 12px 2px 0"

CURVE_POINTS = 300

_WIDTH, _HEIGHT = 480, 140


def paragraph(text: str, *, bold: bool = False) -> str:
    """A line of text."""
    weight = ";font-weight:bold" if bold else ""
    return f'<div style="margin:2px 0{weight}">{escape(text)}</div>'


def rounded(number: float) -> str:
    """Three digits of it, such as `5,640`."""
    return f"{float(f'{number:.3g}'):,.10g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Texts in columns."""
    return f"<table>{_row('th', head)}{''.join(_row('td', row) for row in rows)}</table>"


def _row(kind: str, cells: Sequence[str]) -> str:
    inner = "".join(f'<{kind} style="{_CELL}">{escape(cell)}</{kind}>' for cell in cells)
    return f"<tr>{inner}</tr>"


def plan(
    head: str,
    stages: Iterable[tuple[tuple[int, int], Sequence[tuple[str, int]]]],
    left_out: Sequence[tuple[str, str]],
    changes_results: Sequence[str] = (),
) -> str:
    """A plan: of each stage its units [first, end) and its devices with their shares."""
    rows = [
        (f"stage {number}", f"units {first} to {end - 1}", _devices(devices))
        for number, ((first, end), devices) in enumerate(stages, 1)
    ]
    rows += [("not used", name, reason) for name, reason in left_out]
    changes = "".join(paragraph(f"changes results: {text}") for text in changes_results)
    return f"{paragraph(head, bold=True)}{table(('', 'what', 'who'), rows)}{changes}"


def _devices(devices: Sequence[tuple[str, int]]) -> str:
    if len(devices) == 1:
        return devices[0][0]
    return ", ".join(f"{name} ({share})" for name, share in devices)


def curve(points: Sequence[tuple[float, float | None]], name: str) -> str:
    """(x, y) as a line, thinned out to what can be seen; "" where there are fewer than two."""
    known = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    if len(known) < 2:
        return ""
    stride = -(-len(known) // CURVE_POINTS)
    shown = known[::stride] if (len(known) - 1) % stride == 0 else [*known[::stride], known[-1]]
    left, right = shown[0][0], shown[-1][0]
    low, high = min(y for _, y in shown), max(y for _, y in shown)
    places = " ".join(
        f"{_WIDTH * _part(x, left, right):.1f},{_HEIGHT * (1 - _part(y, low, high)):.1f}"
        for x, y in shown
    )
    text = f"{name}: {known[0][1]:.4g} at {left:,.0f}, {known[-1][1]:.4g} at {right:,.0f}"
    return (
        f'<svg role="img" aria-label="{escape(text)}" viewBox="-4 -4 {_WIDTH + 8} {_HEIGHT + 8}" '
        f'width="{_WIDTH + 8}" height="{_HEIGHT + 8}" style="max-width:100%">'
        f'<polyline points="{places}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
        f"{paragraph(f'{text}; from {low:.4g} to {high:.4g}')}"
    )


def _part(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5
