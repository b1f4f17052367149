"""What may be a label and a picture: no text leads out of the folder, no reason is left out."""

from __future__ import annotations

import contextlib
from pathlib import PurePosixPath, PureWindowsPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import UserError
from p2ptrain.photos.picture import (
    PictureKind,
    checked_picture,
    is_picture_name,
    label_named,
    picture_named,
)
from tests.support.pictures import picture


@given(st.text(max_size=80))
def test_a_label_is_one_visible_folder_or_is_refused(text: str) -> None:
    try:
        label = label_named(text)
    except UserError:
        return
    for path in (PurePosixPath(label), PureWindowsPath(label)):
        assert path.parts == (label,)
        assert not path.is_absolute()
    assert label[0] != "."
    assert label.isprintable()
    assert label_named(label) == label
    assert label_named(label.upper(), [label]) in (label, label.upper())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        (" \t ", "empty"),
        ("..", "dot"),
        (".git", "dot"),
        ("a/b", "a /"),
        ("a\\b", "a \\"),
        ("a\0b", "cannot be shown"),
        ("a\u202eb", "cannot be shown"),
        ("\ud800", "cannot be shown"),
        ("x" * 61, "longer"),
        ("CON", "Windows"),
        ("nul.jpg", "Windows"),
    ],
)
def test_a_label_is_refused_with_its_reason(text: str, why: str) -> None:
    with pytest.raises(UserError) as refused:
        label_named(text)
    assert why in str(refused.value)


def test_labels_of_any_script_are_taken_and_case_makes_no_second_one() -> None:
    for label in ("Äpfel", "猫", "кошка", "rote Äpfel", "🍎"):
        assert label_named(label) == label
    assert label_named("  rote\n A\u0308pfel ") == "rote Äpfel"
    assert label_named("CATS", ["dogs", "cats"]) == "cats"


@given(st.text(max_size=40).map(lambda text: f"{text}.jpg"))
def test_a_picture_is_a_file_of_its_own_folder(name: str) -> None:
    if is_picture_name(name):
        assert PurePosixPath(name).parts == PureWindowsPath(name).parts == (name,) or ":" in name
        assert name[0] != "."


@pytest.mark.parametrize(("kind", "suffix"), [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")])
def test_a_whole_picture_is_taken_and_a_part_of_it_is_not(kind: str, suffix: str) -> None:
    content = picture(1, kind=kind)
    found = checked_picture(content)
    name = picture_named(content, found)
    assert name.endswith(f".{suffix}")
    assert is_picture_name(name)
    assert name == picture_named(picture(1, kind=kind), found) != picture_named(b"x", found)
    for size in range(0, len(content) - 1, 7):
        with pytest.raises(UserError):
            checked_picture(content[:size])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_that_tells_where_it_was_taken_is_refused(kind: str) -> None:
    with pytest.raises(UserError, match="such as the place"):
        checked_picture(picture(1, kind=kind, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0"))


@given(st.binary(max_size=200), st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"]))
def test_any_other_bytes_are_refused_by_that_error_alone(content: bytes, begin: bytes) -> None:
    with contextlib.suppress(UserError):
        assert checked_picture(begin + content) in PictureKind


def test_what_phones_hand_over_otherwise_is_explained() -> None:
    with pytest.raises(UserError, match="Most Compatible"):
        checked_picture(b"\0\0\0\x18ftypheic" + bytes(40))
    with pytest.raises(UserError, match="send JPEG, PNG or WebP"):
        checked_picture(b"GIF89a" + bytes(40))
