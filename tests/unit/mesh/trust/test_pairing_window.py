"""Codes and windows: what people type, how long it counts, what wrong tries do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import OptionError
from p2ptrain.mesh.trust.pairing_window import (
    WINDOW_SECONDS,
    PairingWindow,
    new_code,
    normalised_code,
)


@pytest.mark.parametrize(
    "text", ["12345678", "1234-5678", " 1234 5678 ", "12-34-56-78", "1234\N{EN DASH}5678"]
)
def test_spaces_and_dashes_are_ignored(text: str) -> None:
    assert normalised_code(text) == "12345678"


@pytest.mark.parametrize("text", ["", "1234567", "123456789", "1234567a", "1234.5678", "١٢٣٤٥٦٧٨"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="8 digits"):
        normalised_code(text)


def test_new_codes_are_codes() -> None:
    assert len({normalised_code(new_code()) for _ in range(20)}) > 15


def test_five_wrong_tries_close_the_window() -> None:
    """S7: five wrong tries close the window."""
    window = PairingWindow.opened("12345678", 100.0)
    for tries_left in (4, 3, 2, 1, 0):
        assert window.is_open(101.0)
        window = window.after_wrong_try()
        assert window.tries_left == tries_left
    assert not window.is_open(101.0)
    assert "5 wrong codes" in window.why_closed(101.0)


@given(wrong=st.integers(0, 4), now=st.floats(0, 1e6))
def test_wrong_tries_never_move_its_end(wrong: int, now: float) -> None:
    """S7: wrong tries never move its end."""
    window = PairingWindow.opened("12345678", now)
    for _ in range(wrong):
        window = window.after_wrong_try()
    assert window.closes_at == now + WINDOW_SECONDS
    assert not window.is_open(window.closes_at)
