"""Rows and columns that hold most, where no tile may have more than its own bound.

Of all h, w > 0 with h_r w_c <= most(r, c) those are wanted whose sum h times sum w is largest: if
it is above 1, lines that sum to 1 leave every tile room. In logarithms the bounds are linear and
what is wanted is convex, so it is largest in a corner: where tiles filled to their bounds join all
rows and columns to a spanning tree. A grid of R rows and C columns has binomial(R + C - 2, R - 1)
corners (Develin and Sturmfels, Tropical convexity, 2004), and the exchange of one tile of the tree
for another leads from each to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log, sin

Table = Sequence[Sequence[float]]
"""By row and column of the grid."""
Tree = frozenset[tuple[int, int]]
"""Tiles (row, column) that are filled to their bounds."""

NUDGE = 1e-9
"""Of bounds, relative: each is a little less and no two are equal, so that a corner is one tree."""


@dataclass(frozen=True, slots=True)
class Corner:
    """Rows and columns, the largest of each as 1, and what all tiles hold together.

    Attributes:
        log_area: the logarithm of sum h times sum w.
    """

    rows: list[float]
    columns: list[float]
    log_area: float


def best_corner(most: Table) -> Corner:
    """The one that holds most.

    Args:
        most: of each tile, above zero.
    """
    logs = _logs(most)
    return max(
        (_corner(*_levels(logs, tree)) for tree in _trees(logs)), key=lambda found: found.log_area
    )


def _logs(most: Table) -> Table:
    columns = len(most[0])
    return [
        [log(area) - NUDGE * (1.0 + sin(r * columns + c)) for c, area in enumerate(line)]
        for r, line in enumerate(most)
    ]


def _trees(logs: Table) -> Iterator[Tree]:
    """Of the corners, those nearest to the first one first."""
    waiting = [_first(logs)]
    seen = {*waiting}
    for tree in waiting:
        yield tree
        for other in _beside(logs, tree):
            if other not in seen:
                seen.add(other)
                waiting.append(other)


def _first(logs: Table) -> Tree:
    """The first row fills all its tiles; any other one fills the tile that bounds it then."""
    tiles = [(0, c) for c in range(len(logs[0]))]
    for r in range(1, len(logs)):
        room = [mine - first for mine, first in zip(logs[r], logs[0], strict=True)]
        tiles.append((r, room.index(min(room))))
    return frozenset(tiles)


def _beside(logs: Table, tree: Tree) -> Iterator[Tree]:
    """One exchange away: a tile has less, so that rows grow until another tile is full."""
    rows, columns = _levels(logs, tree)
    for tile in tree:
        rest = tree - {tile}
        growing, shrinking = _joined(rest, tile[1])
        room = [
            (logs[r][c] - rows[r] - columns[c], r, c)
            for r in growing
            for c in range(len(columns))
            if c not in shrinking
        ]
        if room:
            yield rest | {min(room)[1:]}


def _joined(tiles: Tree, column: int) -> tuple[set[int], set[int]]:
    """The rows and columns that tiles join to a column, itself among them."""
    rows, columns, before = set[int](), {column}, 0
    while before < len(rows) + len(columns):
        before = len(rows) + len(columns)
        rows |= {r for r, c in tiles if c in columns}
        columns |= {c for r, c in tiles if r in rows}
    return rows, columns


def _levels(logs: Table, tree: Tree) -> tuple[list[float], list[float]]:
    """Logarithms of the rows and columns that fill the tiles of a tree; the first row has 1."""
    rows, columns, left = {0: 0.0}, dict[int, float](), set(tree)
    while left:
        for r, c in [*left]:
            if r in rows:
                columns[c] = logs[r][c] - rows[r]
            elif c in columns:
                rows[r] = logs[r][c] - columns[c]
            else:
                continue
            left.remove((r, c))
    return [rows[r] for r in range(len(logs))], [columns[c] for c in range(len(logs[0]))]


def _corner(rows: Sequence[float], columns: Sequence[float]) -> Corner:
    """Of logarithms, which may be too large for their powers."""
    heights, widths = ([exp(level - max(line)) for level in line] for line in (rows, columns))
    log_area = max(rows) + log(sum(heights)) + max(columns) + log(sum(widths))
    return Corner(heights, widths, log_area)
