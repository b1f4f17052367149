from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.plan.types import allocation
from p2ptrain.plan.types.allocation import MAX_STEPS, deal, hand_out, max_in_window, sample_ranges

PICTURE = """
samples          micro-batch of 6, shares 3 2 1       a a a b b c
                 a smaller last one of 4              a a a b
micro_batches    7 micro-batches, shares 4 2 1        m = 0 1 2 3 4 5 6
                                                          a b a c a b a
"""
SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple)


def letters(ranges: tuple[tuple[int, int], ...]) -> str:
    each = (name * (end - first) for name, (first, end) in zip("abc", ranges, strict=True))
    return " ".join("".join(each))


def test_the_picture_is_what_is_given() -> None:
    assert PICTURE in (allocation.__doc__ or "")
    divided, smaller, _, dealt = PICTURE.strip().splitlines()
    assert divided.endswith("  " + letters(sample_ranges((3, 2, 1), 6)))
    assert smaller.endswith("  " + letters(sample_ranges((3, 2, 1), 4)))
    assert dealt.strip() == " ".join("abc"[place] for place in deal((4, 2, 1)))


def test_ties_go_to_the_first_listed() -> None:
    assert deal((2, 2)) == (0, 1, 0, 1)
    assert deal((1, 3)) == (1, 0, 1, 1)


@given(SHARES, st.data())
def test_ranges_lie_one_behind_the_other_and_are_cut_off(
    shares: tuple[int, ...], data: st.DataObject
) -> None:
    samples = data.draw(st.integers(0, sum(shares)))
    ranges = sample_ranges(shares, samples)
    assert [end - first for first, end in sample_ranges(shares, sum(shares))] == list(shares)
    end = 0
    for (first, last), share in zip(ranges, shares, strict=True):
        assert first == end
        assert last - first <= share
        assert last - first == share or last == samples
        end = last
    assert end == samples


@given(SHARES)
def test_each_gets_its_share_evenly(shares: tuple[int, ...]) -> None:
    places = deal(shares)
    assert [places.count(i) for i in range(len(shares))] == list(shares)
    for m in range(len(places) + 1):
        for i, share in enumerate(shares):
            assert abs(places[:m].count(i) * len(places) - m * share) < len(shares) * len(places)


@given(SHARES, st.data())
def test_most_in_a_window_is_counted(shares: tuple[int, ...], data: st.DataObject) -> None:
    places = deal(shares)
    place = data.draw(st.integers(0, len(shares) - 1))
    window = data.draw(st.integers(1, len(places) + 2))
    width = min(window, len(places))
    counts = [places[m : m + width].count(place) for m in range(len(places) - width + 1)]
    most, only_with_last = max_in_window(shares, place, window)
    assert most == max(counts)
    without_last = [
        places[m : m + width][: len(places) - 1 - m].count(place) for m in range(len(counts))
    ]
    assert only_with_last == (max(without_last) < most)


@pytest.mark.parametrize(
    ("window", "expected"), [(1, (1, False)), (2, (1, False)), (3, (2, False))]
)
def test_windows_of_the_picture(window: int, expected: tuple[int, bool]) -> None:
    assert max_in_window((4, 2, 1), 0, window) == expected


def test_a_million_millions_are_handed_out_in_thousands_of_steps() -> None:
    """A device that holds a tenth has it all, and the others are done at the same time."""
    asked: list[int] = []

    def seconds(place: int, share: int) -> float:
        asked.append(share)
        return share * (1.0, 1.0, 2.0)[place]

    total = 10**12
    shares = hand_out(total, [1, 1, 1], [total // 10, total, total], seconds)
    assert sum(shares) == total
    assert shares[0] == total // 10
    assert shares[1] == pytest.approx(2 * shares[2], rel=2 / MAX_STEPS)
    assert len(asked) < 10 * MAX_STEPS


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=4), st.data()
)
def test_a_few_are_handed_out_one_by_one(
    places: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Nobody could give one to another who would then be done sooner than he is."""
    most = [limit for limit, _ in places]
    total = data.draw(st.integers(len(most), sum(most)))
    shares = hand_out(total, [1] * len(most), most, lambda i, share: share * places[i][1])
    assert sum(shares) == total
    done = [share * each for share, (_, each) in zip(shares, places, strict=True)]
    for share, (limit, each) in zip(shares, places, strict=True):
        given_one = (share + 1) * each
        others = [d for d, n in zip(done, shares, strict=True) if n > 1]
        assert share == limit or all(given_one >= other for other in others)
