"""How large each tile should be: rows and columns of a grid by their devices' speed and memory.

Tile (r, c) is h_r w_c of every map, with sum h = sum w = 1. Wanted are lines that make the slowest
tile as fast as possible, T = max of h_r w_c / speed(r, c), with h_r w_c <= cap(r, c) where memory
is short. For given columns the best rows are known: the least T for which

    sum over r of  min( T / max_c (w_c / speed),  min_c (cap / w_c) )  >=  1

and the other way round; both are improved in turns, which never makes T larger, from several
starts: columns by the sums of the speeds, by each row alone, equal ones, and by memory.

The best of these may not be the best of all. T can be smaller as long as tiles that are done in
time T can hold more than the maps: of all h, w > 0 with h_r w_c <= most(r, c), is the largest
sum h times sum w above 1? In logarithms the bounds are linear and the product is convex, so it is
largest in a corner, where tiles filled to their bounds join all rows and columns to a spanning
tree. R rows and C columns have binomial(R + C - 2, R - 1) corners (Develin and Sturmfels, Tropical
convexity, 2004); the exchange of one tile of the tree leads from each to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, inf, log, sin, sqrt

from p2ptrain.errors import PlanError

TURNS = 30

MAX_TILES = 25
"""Of a grid whose corners are looked at: 70 at most. Those of 8 x 8 would be 3432."""

MIN_GAIN = 1e-4
"""Of T, relative: less is not worth other lines."""

ROUNDING = 1e-12

MIN_PART = 1e-6
"""Of a row or column: less is no line of any map, and no plan has what is next to nothing."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Parts of the maps' height by row and of their width by column; each sums to 1.

    Attributes:
        slowest: T, in the time that a device of speed 1 needs for the whole.
    """

    rows: tuple[float, ...]
    columns: tuple[float, ...]
    slowest: float


def balanced_shares(speeds: Table, caps: Table | None = None) -> Shares:
    """The lines of a grid.

    Args:
        speeds: of each tile's device, divided by the tiles that it has.
        caps: the largest part of the maps that each tile may have; None = all of them.

    Raises:
        PlanError: the tiles' memory together does not hold the maps.
    """
    caps = caps or [[1.0] * len(row) for row in speeds]
    found = [_improved(speeds, caps, start) for start in _starts(speeds, caps)]
    fitting = [shares for shares in found if shares is not None]
    best = min(fitting, key=lambda shares: shares.slowest, default=None)
    if len(speeds) * len(speeds[0]) <= MAX_TILES:
        best = _best(speeds, caps, best)
    if best is None:
        raise PlanError(
            "the images do not fit: every way to cut them needs more memory than a device has"
        )
    return best


def _best(speeds: Table, caps: Table, found: Shares | None) -> Shares | None:
    """From what was found to the best of all; None where no lines are within memory."""
    enough = inf if found is None else found.slowest * (1.0 - MIN_GAIN)
    corner = _corner_within_caps(speeds, caps, enough)
    if corner.log_area < 0.0:
        return found
    least = 1.0 / sum(map(sum, speeds))
    if found is None:
        enough = max(1.0 / speed for line in speeds for speed in line)
    while enough > least * (1.0 + MIN_GAIN):
        between = sqrt(least) * sqrt(enough)
        tried = _corner_within_caps(speeds, caps, between)
        if tried.log_area < 0.0:
            least = between
        else:
            corner, enough = tried, between
    columns = _normalised([max(column, MIN_PART) for column in corner.columns])
    best = _improved(speeds, caps, columns)
    return found if best is None or (found and found.slowest <= best.slowest) else best


def _starts(speeds: Table, caps: Table) -> list[list[float]]:
    equal = [1.0] * len(speeds[0])
    slowest = [min(column) for column in _turned(speeds)]
    tried = [_sums(_turned(speeds)), equal, slowest, *map(list, speeds), _sums(_turned(caps))]
    return [list(columns) for columns in dict.fromkeys(tuple(_normalised(one)) for one in tried)]


def _corner_within_caps(speeds: Table, caps: Table, slowest: float) -> Corner:
    """The rows and columns that hold most of what devices have memory and time for."""
    return best_corner(
        [
            [max(min(slowest * speed, cap), MIN_PART**2) for speed, cap in zip(*line, strict=True)]
            for line in zip(speeds, caps, strict=True)
        ]
    )


def _improved(speeds: Table, caps: Table, columns: list[float]) -> Shares | None:
    rows: list[float] | None = None
    for _ in range(TURNS):
        rows = _other(speeds, caps, columns)
        if rows is None:
            return None
        turned = _other(_turned(speeds), _turned(caps), rows)
        if turned is None:
            return None
        columns = turned
    assert rows is not None
    slowest = max(
        h * w / speed
        for h, line in zip(rows, speeds, strict=True)
        for w, speed in zip(columns, line, strict=True)
    )
    return Shares(tuple(rows), tuple(columns), slowest)


def _other(speeds: Table, caps: Table, columns: Sequence[float]) -> list[float] | None:
    """The best rows for given columns, none next to nothing; None where memory holds none."""
    per_height = [max(w / speed for w, speed in zip(columns, line, strict=True)) for line in speeds]
    most = [min(cap / w for w, cap in zip(columns, line, strict=True)) for line in caps]
    if sum(most) < 1.0 - ROUNDING:
        return None
    rows = [0.0] * len(per_height)
    free, left = [*range(len(rows))], 1.0
    while free:
        pace = left / sum(1.0 / per_height[r] for r in free)  # T, if no cap bound any more
        bound = [r for r in free if pace / per_height[r] > most[r]]
        if not bound:
            for r in free:
                rows[r] = pace / per_height[r]
            break
        for r in bound:
            rows[r] = most[r]
            left -= most[r]
        free = [r for r in free if r not in bound]
    return _normalised([max(row, MIN_PART) for row in rows])


def _sums(table: Table) -> list[float]:
    return _normalised([sum(line) for line in table])


def _normalised(parts: Sequence[float]) -> list[float]:
    whole = sum(parts)
    return [part / whole for part in parts]


def _turned(table: Table) -> list[list[float]]:
    return [list(column) for column in zip(*table, strict=True)]


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
    logs = logs_of(most)
    return max(
        (_corner(*_levels(logs, tree)) for tree in trees_of(logs)), key=lambda found: found.log_area
    )


def logs_of(most: Table) -> Table:
    """Of areas, each moved a little, so that no two corners are one."""
    columns = len(most[0])
    return [
        [log(area) - NUDGE * (1.0 + sin(r * columns + c)) for c, area in enumerate(line)]
        for r, line in enumerate(most)
    ]


def trees_of(logs: Table) -> Iterator[Tree]:
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
