"""A pairing window between two processes: no end moves, no try comes back."""

from __future__ import annotations

import json
import math

import pytest

from p2ptrain.control.lease import (
    LeasedIdentity,
    place_fields,
    read_place,
    read_window,
    window_fields,
)
from p2ptrain.errors import UserError
from p2ptrain.mesh.trust.pairing_window import WINDOW_SECONDS, PairingWindow

WINDOW = PairingWindow("12345678", 130.0, wrong_tries=3, invited=True)


def test_a_place_travels_between_clocks() -> None:
    fields = json.loads(json.dumps(place_fields(LeasedIdentity("laptop", 4000, WINDOW), now=100.0)))
    place = read_place(fields, now=5000.0)
    assert place == LeasedIdentity(
        "laptop", 4000, PairingWindow("12345678", 5030.0, 3, invited=True)
    )


def test_a_closed_window_travels_too() -> None:
    fields = json.loads(json.dumps(place_fields(LeasedIdentity("laptop", 4000, None), now=100.0)))
    assert read_place(fields, now=5000.0) == LeasedIdentity("laptop", 4000, None)


def test_the_last_word_is_read() -> None:
    text = json.dumps(window_fields(WINDOW, now=100.0))
    assert read_window(text, now=0.0) == PairingWindow("12345678", 30.0, 3, invited=True)


def test_nothing_is_open_for_longer_than_a_window() -> None:
    text = json.dumps(window_fields(WINDOW, now=-1e6))
    window = read_window(text, now=0.0)
    assert window is not None
    assert window.closes_at == WINDOW_SECONDS


@pytest.mark.parametrize(
    "fields",
    [
        None,
        [],
        {},
        {"name": "laptop"},
        {"name": 5, "port": 4000},
        {"name": "laptop", "port": "4000"},
        {"name": "laptop", "port": 70000},
        {"name": "laptop", "port": -1},
    ],
)
def test_a_place_that_is_none_is_an_error_of_ours(fields: object) -> None:
    with pytest.raises(UserError, match="p2ptrain join"):
        read_place(fields, now=0.0)


@pytest.mark.parametrize(
    "window",
    [
        {"code": "1234", "seconds_left": 5, "wrong_tries": 0, "invited": False},
        {"code": "12345678", "seconds_left": math.inf, "wrong_tries": 0, "invited": False},
        {"code": "12345678", "seconds_left": math.nan, "wrong_tries": 0, "invited": False},
        {"code": "12345678", "seconds_left": 5, "wrong_tries": -9, "invited": False},
        [[]] * 3,
    ],
)
def test_a_window_that_is_none_is_closed(window: object) -> None:
    place = read_place({"name": "laptop", "port": 4000, "window": window}, now=0.0)
    assert place.window is None


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "",
        "[]",
        "{}",
        '"x"',
        '{"window": null}',
        '{"window": {"code": 5}}',
        '{"window": 1}',
    ],
)
def test_what_is_missing_or_unreadable_is_closed(text: str) -> None:
    assert read_window(text, now=0.0) is None
