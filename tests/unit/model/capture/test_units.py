"""Choosing cuts on hand-made landscapes; no torch needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.model.capture.units import (
    MAXIMUM_UNITS,
    Landscape,
    choose_cuts,
    common_path,
    unit_names,
)


def _landscape(rows: list[tuple[str, float, bool, float | None]]) -> Landscape:
    """(module, work, heavy, width of the cut before it) for each node."""
    return Landscape(
        work=[row[1] for row in rows],
        heavy=[row[2] for row in rows],
        modules=[row[0] for row in rows],
        widths={k: row[3] for k, row in enumerate(rows) if k and row[3] is not None},
    )


def test_a_norm_and_its_activation_stay_with_their_convolution() -> None:
    block = [("a.conv", 9.0, True, 4.0), ("a.norm", 1.0, False, 4.0), ("a.relu", 1.0, False, 4.0)]
    other = [("b.conv", 9.0, True, 4.0), ("b.norm", 1.0, False, 4.0)]
    landscape = _landscape(block + other)
    assert choose_cuts(landscape) == [3]
    assert unit_names([3], landscape) == ["a.conv", "b.conv"]


def test_the_narrowest_cut_between_two_products_wins() -> None:
    rows = [("a", 9.0, True, None), ("a", 1.0, False, 8.0), ("b", 1.0, False, 2.0)]
    rows.append(("b", 9.0, True, 8.0))
    assert choose_cuts(_landscape(rows)) == [2]


def test_where_no_cut_is_possible_there_is_none() -> None:
    rows = [("a", 9.0, True, None), ("a", 1.0, False, None), ("b", 9.0, True, None)]
    assert choose_cuts(_landscape(rows)) == []


def test_a_wide_cut_inside_little_work_goes() -> None:
    narrow = [(f"m{k}", 100.0, True, 1.0) for k in range(30)]
    narrow[7] = ("m7", 1.0, True, 6.0)
    cuts = choose_cuts(_landscape(narrow))
    assert 7 not in cuts
    assert len(cuts) == 28


@given(
    st.lists(
        st.tuples(st.floats(0, 1e9), st.booleans(), st.one_of(st.none(), st.floats(0, 1e9))),
        min_size=1,
        max_size=200,
    )
)
def test_cuts_are_possible_ascending_and_few(
    rows: list[tuple[float, bool, float | None]],
) -> None:
    landscape = _landscape([("m", work, heavy, width) for work, heavy, width in rows])
    cuts = choose_cuts(landscape)
    assert cuts == sorted(set(cuts))
    assert set(cuts) <= set(landscape.widths)
    assert len(cuts) < MAXIMUM_UNITS
    names = unit_names(cuts, landscape)
    assert len(set(names)) == len(names) == len(cuts) + 1


def test_common_path() -> None:
    assert common_path(["a.b.c", "a.b.d"]) == "a.b"
    assert common_path(["a.b", "a.bc"]) == "a"
    assert common_path(["a", "b"]) == ""
    assert common_path([]) == ""
