"""Codes and windows: what people type, how long it counts, what wrong tries do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import OptionError, UserError
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.trust.pairing_window import (
    CODES_FILE,
    MAX_CODES,
    WINDOW_SECONDS,
    KnownCodes,
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


ID = "ab" * 32


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "state")


def test_a_removal_spends_what_was_taken_and_nothing_else(folder: StateFolder) -> None:
    known = KnownCodes(folder, ID)
    for code in ("11111111", "22222222"):
        known.take(code)
    assert not known.is_spent("11111111")
    known.spend()
    known.take("33333333")
    for again in (known, KnownCodes(folder, ID)):  # after a restart too
        spent = [again.is_spent(code) for code in ("11111111", "22222222", "33333333", "44444444")]
        assert spent == [True, True, False, False]


def test_a_code_that_is_spent_stays_so(folder: StateFolder) -> None:
    known = KnownCodes(folder, ID)
    known.take("11111111")
    known.spend()
    known.spend()
    assert KnownCodes(folder, ID).is_spent("11111111")


def test_codes_do_not_stand_there_to_be_read(folder: StateFolder) -> None:
    KnownCodes(folder, ID).take("12345678")
    content = folder.read(CODES_FILE)
    assert content is not None
    assert b"12345678" not in content


def test_they_are_not_many(folder: StateFolder) -> None:
    known = KnownCodes(folder, ID)
    for number in range(MAX_CODES + 1):
        known.take(f"{number:08d}")
    known.spend()
    assert not known.is_spent("00000000")
    assert known.is_spent(f"{MAX_CODES:08d}")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"format": "p2ptrain.codes/1"}'])
def test_a_damaged_file_is_named(folder: StateFolder, content: bytes) -> None:
    folder.write(CODES_FILE, content)
    with pytest.raises(UserError, match=r"codes\.json is broken"):
        KnownCodes(folder, ID)
