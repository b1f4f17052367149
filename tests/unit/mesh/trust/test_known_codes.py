from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.errors import UserError
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.trust.pairing_window import CODES_FILE, MAX_CODES, KnownCodes

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
