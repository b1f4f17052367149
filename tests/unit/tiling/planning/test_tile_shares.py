from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2ptrain.errors import PlanError
from p2ptrain.plan.types.planning_file import MIN_ABOVE_ZERO
from p2ptrain.tiling.planning.tile_shares import MIN_GAIN, balanced_shares
from tests.support.thorough import examples_of


def test_one_row_is_divided_by_speed() -> None:
    shares = balanced_shares([[1.0, 3.0]])
    assert shares.rows == (1.0,)
    assert shares.columns == pytest.approx((0.25, 0.75))
    assert shares.slowest == pytest.approx(0.25)


def test_speeds_that_are_a_product_are_met() -> None:
    shares = balanced_shares([[2.0, 6.0], [1.0, 3.0]])
    assert shares.rows == pytest.approx((2 / 3, 1 / 3))
    assert shares.columns == pytest.approx((0.25, 0.75))
    assert shares.slowest == pytest.approx(1 / 12)


def test_memory_bounds_a_tile() -> None:
    shares = balanced_shares([[1.0, 1.0, 2.0]], [[1.0, 1.0, 0.3]])
    assert shares.columns == pytest.approx((0.35, 0.35, 0.3))


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(PlanError, match="the images do not fit"):
        balanced_shares([[1.0, 1.0]], [[0.4, 0.5]])


def test_memory_that_only_uneven_lines_meet_is_found() -> None:
    """Both lines lie near an edge: h w and (1 - h)(1 - w) are at most 0.05."""
    shares = balanced_shares([[1.0, 1.0], [1.0, 1.0]], [[0.05, 1.0], [0.5, 0.05]])
    (top, bottom), (left, right) = shares.rows, shares.columns
    assert max(top * left, bottom * right) <= 0.05 + 1e-9
    assert bottom * left <= 0.5


def test_memory_for_next_to_nothing_is_none() -> None:
    with pytest.raises(PlanError, match="the images do not fit"):
        balanced_shares([[1.0, 1.0]], [[1.0, 1e-10]])


@settings(max_examples=examples_of(30), deadline=None)
@given(st.lists(st.lists(st.integers(-300, 0), min_size=3, max_size=3), min_size=1, max_size=3))
def test_however_slow_a_device_is_no_line_is_too_thin_for_a_plan(powers: list[list[int]]) -> None:
    shares = balanced_shares([[10.0**power for power in line] for line in powers])
    for parts in (shares.rows, shares.columns):
        assert sum(parts) == pytest.approx(1)
        assert min(parts) >= 2 * MIN_ABOVE_ZERO


@settings(max_examples=examples_of(10), deadline=None)
@given(
    st.lists(st.lists(st.floats(0.2, 5.0), min_size=3, max_size=3), min_size=2, max_size=2),
    st.floats(0.2, 1.0),
)
@example([[4.0, 0.625, 1.75], [0.375, 2.0, 1.0]], 0.5)
def test_no_lines_of_a_fine_grid_are_better(speeds: list[list[float]], cap: float) -> None:
    """Against all lines at multiples of 1/8; and within memory."""
    caps = [[cap] * 3 for _ in range(2)]
    shares = balanced_shares(speeds, caps)
    assert sum(shares.rows) == pytest.approx(1)
    assert sum(shares.columns) == pytest.approx(1)
    tiles = [
        (h * w, s, r, c)
        for r, h in enumerate(shares.rows)
        for c, (w, s) in enumerate(zip(shares.columns, speeds[r], strict=True))
    ]
    assert max(area for area, *_ in tiles) <= cap + 1e-9
    assert shares.slowest == pytest.approx(max(area / speed for area, speed, *_ in tiles))
    best = min(
        max(
            h * w / s
            for h, line in zip(rows, speeds, strict=True)
            for w, s in zip(columns, line, strict=True)
        )
        for rows in lines(2)
        for columns in lines(3)
        if max(rows) * max(columns) <= cap
    )
    assert shares.slowest <= best * (1 + MIN_GAIN)


def lines(count: int) -> list[tuple[float, ...]]:
    steps = range(1, 8)
    if count == 2:
        return [(k / 8, 1 - k / 8) for k in steps]
    return [(j / 8, k / 8, 1 - (j + k) / 8) for j in steps for k in steps if j + k < 8]
