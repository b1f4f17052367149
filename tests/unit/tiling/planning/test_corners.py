from __future__ import annotations

from itertools import combinations
from math import comb, exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.tiling.planning import tile_shares
from p2ptrain.tiling.planning.tile_shares import Table, best_corner
from tests.support.thorough import examples_of


def tables(rows: int, columns: int) -> st.SearchStrategy[list[list[float]]]:
    """Some with many equal bounds."""
    bounds = st.sampled_from([0.05, 0.1, 0.5, 1.0]) | st.floats(0.01, 1.0)
    line = st.lists(bounds, min_size=columns, max_size=columns)
    return st.lists(line, min_size=rows, max_size=rows)


def test_one_row_fills_every_tile() -> None:
    corner = best_corner([[0.1, 0.4]])
    assert corner.rows == [1.0]
    assert corner.columns == pytest.approx([0.25, 1.0])
    assert exp(corner.log_area) == pytest.approx(0.5)


def test_of_two_crossing_lines_one_is_thin() -> None:
    corner = best_corner([[0.01, 1.0], [1.0, 0.01]])
    assert sorted(corner.rows) == pytest.approx([0.01, 1.0])
    assert sorted(corner.columns) == pytest.approx([0.01, 1.0])


@settings(max_examples=examples_of(20), deadline=None)
@given(tables(2, 3) | tables(3, 2) | tables(3, 3))
def test_nothing_holds_more(most: list[list[float]]) -> None:
    """Against every way to fill as many tiles as a spanning tree has."""
    corner = best_corner(most)
    factor = min(
        bound / (h * w)
        for h, line in zip(corner.rows, most, strict=True)
        for w, bound in zip(corner.columns, line, strict=True)
    )
    held = factor * sum(corner.rows) * sum(corner.columns)
    assert held == pytest.approx(held_at_most(most), rel=1e-6)
    assert exp(corner.log_area) == pytest.approx(held, rel=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (2, 2), (2, 7), (3, 3), (3, 5), (4, 4)])
def test_equal_bounds_have_no_more_corners_than_others(rows: int, columns: int) -> None:
    seen = list(tile_shares.trees_of(tile_shares.logs_of([[0.5] * columns] * rows)))
    assert len({*seen}) == len(seen) == comb(rows + columns - 2, rows - 1)


def held_at_most(most: Table) -> float:
    tiles = [(r, c) for r in range(len(most)) for c in range(len(most[0]))]
    joining = combinations(tiles, len(most) + len(most[0]) - 1)
    return max(held_by(most, filled) for filled in joining)


def held_by(most: Table, filled: tuple[tuple[int, int], ...]) -> float:
    """Sum h times sum w where these tiles are filled, 0 where that bounds no line or fits not."""
    rows, columns = {0: 1.0}, dict[int, float]()
    for _ in filled:
        for r, c in filled:
            if r in rows:
                columns.setdefault(c, most[r][c] / rows[r])
            elif c in columns:
                rows[r] = most[r][c] / columns[c]
    if len(rows) < len(most) or len(columns) < len(most[0]):
        return 0.0
    fits = all(
        rows[r] * columns[c] <= bound * (1 + 1e-9)
        for r, line in enumerate(most)
        for c, bound in enumerate(line)
    )
    return sum(rows.values()) * sum(columns.values()) if fits else 0.0
