"""The folder of pictures: what is kept once, where, and what no browser reaches."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from p2ptrain.errors import UserError
from p2ptrain.photos.folder import PhotoFolder, PhotoLimits
from p2ptrain.photos.uncertain import UncertainPicture, UncertainPictures, write_uncertain
from tests.support.pictures import picture

LIMITS = PhotoLimits(free_bytes=0)


@pytest.fixture
def folder(tmp_path: Path) -> PhotoFolder:
    return PhotoFolder(tmp_path / "fruit", LIMITS)


def _files(folder: PhotoFolder) -> set[str]:
    found = (place for place in folder.path.rglob("*") if place.is_file())
    return {place.relative_to(folder.path).as_posix() for place in found}


def _counts(folder: PhotoFolder) -> dict[str, int]:
    return {label.name: label.pictures for label in folder.labels()}


def test_a_picture_lies_once_under_one_label_as_imagefolder_reads_it(folder: PhotoFolder) -> None:
    first = folder.add("Äpfel", picture(1))
    assert first.is_new
    assert _files(folder) == {f"Äpfel/{first.file}"}
    for label in ("Äpfel", "äPFEL", "pears"):
        again = folder.add(label, picture(1))
        assert (again.label, again.file, again.is_new) == ("Äpfel", first.file, False)
    assert _counts(folder) == {"Äpfel": 1}
    folder.add("pears", picture(2))
    assert _counts(folder) == {"pears": 1, "Äpfel": 1}
    assert folder.read("Äpfel", first.file) == ("image/jpeg", picture(1))


def test_pictures_that_come_together_are_kept_once(folder: PhotoFolder) -> None:
    added, gate = [], threading.Barrier(8)

    def send(number: int) -> None:
        gate.wait()
        added.append(folder.add(("apples", "pears")[number % 2], picture(1)))

    threads = [threading.Thread(target=send, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(one.is_new for one in added) == 1
    assert len(_files(folder)) == 1


def test_a_correction_moves_the_picture_and_an_empty_label_goes(folder: PhotoFolder) -> None:
    wrong = folder.add("apples", picture(1))
    assert folder.move("apples", wrong.file, "pears") == "pears"
    assert _files(folder) == {f"pears/{wrong.file}"}
    assert _counts(folder) == {"pears": 1}
    with pytest.raises(UserError, match="not there any more"):
        folder.move("apples", wrong.file, "pears")
    (folder.path / "plums").mkdir()
    (folder.path / "plums" / wrong.file).write_bytes(b"another")
    with pytest.raises(UserError, match="has another picture"):
        folder.move("pears", wrong.file, "plums")
    (folder.path / "plums" / wrong.file).write_bytes(picture(1))
    folder.move("pears", wrong.file, "plums")
    assert _counts(folder) == {"plums": 1}


def test_nothing_outside_is_read_or_written(folder: PhotoFolder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.jpg").write_bytes(picture(9))
    (tmp_path / "secret.jpg").write_bytes(picture(9))
    (folder.path / "linked").symlink_to(outside)
    inside = folder.add("apples", picture(1))
    (folder.path / "apples" / "link.jpg").symlink_to(outside / "secret.jpg")
    assert _counts(folder) == {"apples": 1}
    reached = [
        ("linked", "secret.jpg"),
        ("apples", "link.jpg"),
        ("..", "secret.jpg"),
        ("apples", "../../secret.jpg"),
        ("", "secret.jpg"),
        ("apples", ""),
        (".", "secret.jpg"),
        (str(outside), "secret.jpg"),
    ]
    for label, file in reached:
        with pytest.raises(UserError, match="not there any more"):
            folder.read(label, file)
        with pytest.raises(UserError, match="not there any more"):
            folder.move(label, file, "pears")
    with pytest.raises(UserError, match="is a link"):
        folder.add("linked", picture(2))
    with pytest.raises(UserError, match="is a link"):
        folder.move("apples", inside.file, "linked")
    with pytest.raises(UserError, match="cannot be a label"):
        folder.add("../outside", picture(2))
    assert os.listdir(outside) == ["secret.jpg"]


def test_what_is_too_much_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    size = len(picture(1))
    cases = [
        (PhotoLimits(picture_bytes=size - 1, free_bytes=0), "at most"),
        (PhotoLimits(pixels=80 * 60 - 1, free_bytes=0), "4,800 pixels"),
        (PhotoLimits(total_bytes=size - 1, free_bytes=0), "of pictures already"),
        (PhotoLimits(pictures=0, free_bytes=0), "0 pictures already"),
        (PhotoLimits(labels=0, free_bytes=0), "0 labels already"),
        (PhotoLimits(free_bytes=2**60), "less than"),
    ]
    for limits, why in cases:
        folder = PhotoFolder(tmp_path / "fruit", limits)
        with pytest.raises(UserError, match=why):
            folder.add("apples", picture(1))
        assert not _files(folder)
    broken = bytearray(picture(1, kind="PNG"))
    broken[60:90] = bytes(30)
    with pytest.raises(UserError, match="cannot be decoded"):
        PhotoFolder(tmp_path / "fruit", LIMITS).add("apples", bytes(broken))


def test_a_disk_that_refuses_is_said_and_leaves_no_part(
    folder: PhotoFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="the disk is full"):
        folder.add("apples", picture(1))
    assert not _files(folder)


def test_parts_of_a_process_that_was_killed_are_swept(tmp_path: Path) -> None:
    folder = tmp_path / "fruit"
    folder.mkdir()
    for name, age in ((".0123456789abcdef.upload", 7200), (".fedcba9876543210.upload", 60)):
        (folder / name).write_bytes(b"part")
        then = (folder / name).stat().st_mtime - age
        os.utime(folder / name, (then, then))
    (folder / ".keep").touch()
    PhotoFolder(folder)
    assert sorted(os.listdir(folder)) == [".fedcba9876543210.upload", ".keep"]


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, why in [
        (tmp_path / "file", "File exists"),
        (tmp_path / "a" / "b", "No such file"),
        (Path.home(), "for pictures alone"),
        (Path("/"), "for pictures alone"),
    ]:
        with pytest.raises(UserError, match=why):
            PhotoFolder(place)


def test_doubted_pictures_are_those_that_still_lie_there(folder: PhotoFolder) -> None:
    assert folder.uncertain() == (0, 0, ())
    here, moved = folder.add("apples", picture(1)), folder.add("apples", picture(2))
    files = (here.file, moved.file, "../../secret.jpg", "gone.jpg")
    found = tuple(UncertainPicture("apples", file, "pears", 0.25) for file in files)
    write_uncertain(folder.path, UncertainPictures(7, 9, found))
    folder.move("apples", moved.file, "pears")
    assert folder.uncertain() == (7, 9, found[:1])
    assert _counts(folder) == {"apples": 1, "pears": 1}
    for wrong in (b"{", b"[]", b'{"step": -1}', b"\xff"):
        (folder.path / "uncertain.json").write_bytes(wrong)
        assert folder.uncertain() == (0, 0, ())
