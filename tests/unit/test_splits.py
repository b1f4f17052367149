from __future__ import annotations

from itertools import permutations

import pytest

from tests.support.splits import SHAPES, away, parts


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [3, 5, 6])
def test_every_shape_keeps_something_apart_and_names_devices_that_there_are(
    shape: str, count: int
) -> None:
    blocked = SHAPES[shape](count, 1)
    assert blocked or (shape == "ring" and count == 3)
    assert blocked <= set(permutations(range(count), 2))
    two_way = {(b, a) for a, b in blocked} == blocked
    assert two_way == (shape not in ("mute", "deaf"))


def test_parts_hear_themselves_alone() -> None:
    blocked = parts(4, [2], [3])
    heard = set(permutations(range(4), 2)) - blocked
    assert heard == {(0, 1), (1, 0)}
    assert away(4, blocked) == {2, 3}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("one", {4}),
        ("halves", {3, 4}),
        ("majority", {2, 3, 4}),
        ("third", {3, 4}),
        ("holder", {1, 2, 3, 4}),
        ("leader", {2}),
        ("ring", {2, 3}),
        ("mute", {4}),
        ("deaf", {4}),
    ],
)
def test_who_is_away_from_the_data(shape: str, expected: set[int]) -> None:
    assert away(5, SHAPES[shape](5, 2)) == expected


def test_in_a_ring_of_five_each_hears_a_majority_and_no_two_the_same() -> None:
    blocked = SHAPES["ring"](5, 0)
    heard = [frozenset(a for a in range(5) if (a, b) not in blocked) for b in range(5)]
    assert {len(majority) for majority in heard} == {3}
    assert len(set(heard)) == 5
