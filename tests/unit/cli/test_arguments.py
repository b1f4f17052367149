"""Values on the command line: exactly understood, or wrong usage."""

from __future__ import annotations

import argparse
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.cli import arguments
from p2ptrain.errors import OptionError
from p2ptrain.mesh.identity import state_folder


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * 1024**3),
        ("500MB", 500_000_000),
        ("1.5 GiB", 3 * 512 * 1024**2),
        ("1048576", 1048576),
        ("10b", 10),
        ("3TiB", 3 * 1024**4),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert arguments.size_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "2 Gi", "-1GB", "2GiBs", "1e9", "0", "nan", "2,5GB", "9" * 400 + ".5GB"]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        arguments.size_bytes(text)


@given(st.integers(min_value=1, max_value=10**15))
def test_whole_sizes_are_exact(size: int) -> None:
    assert arguments.size_bytes(str(size)) == size


@given(st.text())
def test_a_size_is_understood_or_refused(text: str) -> None:
    with contextlib.suppress(argparse.ArgumentTypeError):
        assert arguments.size_bytes(text) >= 1


@pytest.mark.parametrize("text", ["12345678", "1234 5678", "1234-5678", " 12-34 56-78 "])
def test_codes_lose_spaces_and_dashes(text: str) -> None:
    assert arguments.code(text) == "12345678"


@pytest.mark.parametrize("text", ["1234567", "123456789", "abcdefgh", "", "١٢٣٤٥٦٧٨"])
def test_no_codes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="8 digits"):
        arguments.code(text)


@pytest.mark.parametrize(
    "text", ["laptop", "192.168.1.20", "laptop.local:4000", "[fe80::1]:4000", "[::1]", "fe80::1"]
)
def test_peers(text: str) -> None:
    assert arguments.peer(text) == text


@pytest.mark.parametrize(
    "text", ["", ":4000", "laptop:", "laptop:0", "laptop:99999", "laptop:http", "[]:4000"]
)
def test_no_peers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        arguments.peer(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "x", "1_000"])
def test_no_counts(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        arguments.positive(text)


def test_two_counts() -> None:
    assert arguments.two_counts("10,100") == (10, 100)


@pytest.mark.parametrize("text", ["", "10", "10,", ",10", "10,0", "1,2,3"])
def test_no_two_counts(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        arguments.two_counts(text)


@pytest.mark.parametrize("text", ["0", "-3", "nan", "inf", "soon"])
def test_no_times(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        arguments.seconds(text)


def test_batch_sizes_are_sorted_and_unique() -> None:
    assert arguments.whole_numbers("16,1, 4,16") == (1, 4, 16)


@pytest.mark.parametrize("text", ["hidden", "=3", "a b=3", "1x=3"])
def test_no_settings(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        arguments.key_value(text)


def test_a_setting_may_hold_equals_signs() -> None:
    assert arguments.key_value("path=a=b") == ("path", "a=b")


def test_the_variable_names_the_state_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv(state_folder.STATE_DIR_VARIABLE, str(tmp_path))
    assert str(state_folder.default_state_dir()) == str(tmp_path)


NOBODY = "~no-such-user/folder"


def test_a_home_of_an_unknown_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for parse in (arguments.path, arguments.state_dir):
        with pytest.raises(argparse.ArgumentTypeError, match="there is no such user"):
            parse(NOBODY)
    monkeypatch.setenv(state_folder.STATE_DIR_VARIABLE, NOBODY)
    with pytest.raises(OptionError, match=r"\$P2PTRAIN_STATE_DIR is '~no-such-user/folder'"):
        state_folder.default_state_dir()
