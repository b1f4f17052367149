"""Which versions belong to a job's history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import ProtocolError
from p2ptrain.net.forms import write_form
from p2ptrain.net.read_form import read_form
from p2ptrain.recovery.version import ERAS_LIMIT, Era, Lineage, Version

_BRANCHED = Lineage((Era(1, 0, 0), Era(2, 50, 1), Era(3, 100, 2)))
"""The picture in version.py."""


@pytest.mark.parametrize(
    ("step", "computed", "valid"),
    [
        (0, 0, True),
        (1, 0, False),
        (0, 1, False),
        (50, 1, True),
        (51, 1, False),
        (50, 2, False),
        (51, 2, True),
        (100, 2, True),
        (101, 2, False),
        (100, 3, False),
        (101, 3, True),
        (9999, 3, True),
        (101, 4, False),
    ],
)
def test_the_history_is_what_the_last_era_goes_on_with(
    step: int, computed: int, valid: bool
) -> None:
    assert _BRANCHED.is_valid(Version(step, computed)) is valid


def test_a_step_back_beyond_several_eras_leaves_the_first_of_them_shorter() -> None:
    lineage = Lineage((Era(1, 0, 0), Era(2, 100, 1), Era(3, 50, 1)))
    assert lineage.is_valid(Version(50, 1))
    assert not lineage.is_valid(Version(51, 1))
    assert not lineage.is_valid(Version(100, 1))
    assert not lineage.is_valid(Version(101, 2))


def test_an_generation_that_does_not_rise_is_refused() -> None:
    with pytest.raises(ProtocolError, match="generation 3 cannot begin"):
        _BRANCHED.begun(3, Version(100, 3))


def _walk(moves: list[tuple[int, int]]) -> tuple[Lineage, dict[int, Version], set[Version]]:
    """A job that makes `advance` steps a generation, then falls back by up to `back`.

    Returns the lineage, the true history by step, and every version that ever was.
    """
    history = {0: Version(0, 0)}
    ever = {Version(0, 0)}
    lineage, now = Lineage(), 0
    for generation, (back, advance) in enumerate(moves, 1):
        now = max(0, now - back)
        history = {step: version for step, version in history.items() if step <= now}
        lineage = lineage.begun(generation, history[now])
        for step in range(now + 1, now + advance + 1):
            history[step] = Version(step, generation)
        now += advance
        ever |= set(history.values())
    return lineage, history, ever


_MOVES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12)


@given(_MOVES)
def test_valid_are_exactly_the_versions_on_the_way_to_the_present_one(
    moves: list[tuple[int, int]],
) -> None:
    lineage, history, ever = _walk(moves)
    assert {version for version in ever if lineage.is_valid(version)} == set(history.values())


@given(_MOVES, st.integers(0, 40))
def test_pruning_changes_nothing_above_the_oldest_version(
    moves: list[tuple[int, int]], oldest: int
) -> None:
    lineage, _, ever = _walk(moves)
    pruned = lineage.pruned(oldest)
    for version in ever:
        if version.step >= oldest:
            assert pruned.is_valid(version) == lineage.is_valid(version)


def test_pruning_bounds_the_number_of_eras() -> None:
    lineage = Lineage(
        tuple(Era(generation, generation, generation - 1) for generation in range(1, 200))
    )
    assert len(lineage.pruned(0).eras) == ERAS_LIMIT


@given(_MOVES)
def test_a_lineage_travels(moves: list[tuple[int, int]]) -> None:
    lineage, _, _ = _walk(moves)
    assert read_form(Lineage, write_form(lineage), "lineage") == lineage


@pytest.mark.parametrize(
    "value", [None, "x", [[1, 2]], [[1, 2, -1]], [[2, 0, 0], [1, 0, 0]], [[1, 0, 0]] * 65]
)
def test_a_lineage_that_cannot_be_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError):
        read_form(Lineage, {"eras": value}, "lineage")
