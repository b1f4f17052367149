from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.plan.types.feature_maps import AxisSpan, AxisWindow, Region
from tests.support.feature_maps import drawn_windows


def read_by(window: AxisWindow, output: int) -> list[int]:
    return [
        output * window.stride - window.before + window.dilation * j for j in range(window.kernel)
    ]


@settings(max_examples=40, deadline=None)
@given(drawn_windows(), st.integers(1, 40), st.data())
def test_needed_and_padding_are_all_that_outputs_read(
    window: AxisWindow, size: int, data: st.DataObject
) -> None:
    count = window.outputs(size)
    if count < 1:
        return
    first = data.draw(st.integers(0, count - 1))
    outputs = AxisSpan(first, data.draw(st.integers(first + 1, count)))
    positions = [p for o in range(outputs.first, outputs.end) for p in read_by(window, o)]
    needed = window.needed(outputs, size)
    before, after = window.padding(outputs, size)
    assert before + needed.size + after == max(positions) - min(positions) + 1
    assert all(needed.first <= p < needed.end for p in positions if 0 <= p < size)
    if needed.size:
        assert needed.first - before == min(positions)
        assert needed.end + after == max(positions) + 1


@settings(max_examples=40, deadline=None)
@given(drawn_windows(), st.integers(1, 40))
def test_the_last_output_fits_and_one_more_would_not(window: AxisWindow, size: int) -> None:
    count = window.outputs(size)
    if count >= 1:
        assert max(read_by(window, count - 1)) < size + window.after
    assert count < 1 or max(read_by(window, count)) >= size + window.after


@settings(max_examples=40, deadline=None)
@given(drawn_windows(), st.integers(1, 20), st.integers(-3, 20), st.integers(0, 20))
def test_taps_are_counted(window: AxisWindow, output: int, first: int, length: int) -> None:
    counted = AxisSpan(first, first + length)
    expected = sum(counted.first <= p < counted.end for p in read_by(window, output))
    assert window.taps(AxisSpan(output, output + 1), counted) == (expected,)


@pytest.mark.parametrize(
    ("window", "line", "expected"),
    [
        (AxisWindow(3, 1, 1, 1, 1), 5, 5),
        (AxisWindow(2, 2), 5, 10),
        (AxisWindow(3, 2, 1, 1, 1), 5, 10),
        (AxisWindow(7, 2, 1, 3, 3), 5, 10),
        (AxisWindow(1, 2), 5, 10),
        (AxisWindow(3, 1, 2, 2, 2), 5, 5),
        (AxisWindow(3, 1), 5, 6),
    ],
)
def test_lines_of_the_input(window: AxisWindow, line: int, expected: int) -> None:
    assert window.line_before(line, 100) == expected


def test_regions() -> None:
    left, right = Region(AxisSpan(0, 4), AxisSpan(0, 3)), Region(AxisSpan(2, 6), AxisSpan(1, 5))
    assert left.intersection(right) == Region(AxisSpan(2, 4), AxisSpan(1, 3))
    assert left.hull(right) == Region(AxisSpan(0, 6), AxisSpan(0, 5))
    assert left.hull(Region(AxisSpan(9, 9), AxisSpan(0, 5))) == left
    assert right.within(left.hull(right)) == (slice(2, 6), slice(1, 5))
