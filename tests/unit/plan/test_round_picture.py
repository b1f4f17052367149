"""Bars of the last rounds: whole ones only, few enough, and in the picture."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.errors import ProtocolError
from p2ptrain.plan.round_picture import BARS_LIMIT, KINDS, Bar, RoundPicture, last_rounds
from p2ptrain.plan.types.timeline import TimelineEntry


def _round(number: int, *devices: str) -> list[TimelineEntry]:
    """A second long: each device computes forward, sends, waits, computes backward, updates."""
    found = []
    for device in devices:
        for kind, start, end in (
            ("forward", 0.0, 0.2),
            ("send output", 0.2, 0.3),
            ("wait gradient", 0.2, 0.6),
            ("backward", 0.6, 0.8),
            ("update", 0.8, 1.0),
        ):
            at = float(number)
            found.append(TimelineEntry(kind, device, 0, 0, at + start, at + end, round=number))  # type: ignore[arg-type]
    return found


def _watched(*numbers: int) -> list[TimelineEntry]:
    return [entry for number in numbers for entry in _round(number, "a", "b")]


def test_the_last_whole_rounds_are_shown() -> None:
    picture = last_rounds(_watched(3, 4, 5, 6), ("a", "b"))
    assert picture.rounds == (4, 5)  # of 3 the beginning may be missing, 6 is under way
    assert picture.starts == (0.0, 1.0)
    assert picture.seconds == 2.0
    of_b = [(KINDS[bar.kind], bar.start, bar.end) for bar in picture.bars if bar.device == 1]
    assert ("wait", 0.2, 0.6) in of_b
    assert ("send", 1.2, 1.3) in of_b
    assert ("update", 1.8, 2.0) in of_b


@pytest.mark.parametrize("numbers", [(), (3,), (3, 4), (3, 9)])
def test_without_a_whole_round_nothing_is_drawn(numbers: tuple[int, ...]) -> None:
    picture = last_rounds(_watched(*numbers), ("a", "b"))
    assert (picture.seconds, picture.bars) == (0.0, ())
    late = [*_watched(3), *_round(4, "a"), *_watched(5)]
    assert last_rounds(late, ("a", "b")).rounds == ()  # b has not shown what it did in 4


def test_a_large_household_gives_no_more_bars_than_can_travel() -> None:
    names = tuple(f"d{n}" for n in range(32))
    pieces = []
    for number in range(4):
        for name in names:
            for n in range(80):
                at = number + n / 80
                bar = TimelineEntry("forward", name, 0, n, at, at + 1 / 180, round=number)
                pieces += [bar, replace(bar, kind="wait input", start_seconds=at + 1 / 160)]
    picture = last_rounds(pieces, names)
    assert 1000 < len(picture.bars) <= BARS_LIMIT
    assert RoundPicture.from_bytes(picture.to_bytes()) == picture


def test_a_bar_of_no_device_is_refused() -> None:
    wrong = RoundPicture(("a",), 1.0, (1,), (0.0,), (Bar(1, 0, 0.0, 1.0),))
    with pytest.raises(ProtocolError):
        RoundPicture.from_bytes(wrong.to_bytes())
