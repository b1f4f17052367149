"""Checkpoints on disk: at every moment one that is whole, and never more than two."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2ptrain import failpoints
from p2ptrain.errors import OptionError
from p2ptrain.files import open_json, seal_json
from p2ptrain.state import checkpoint_files, weights_files
from p2ptrain.state.checkpoint_files import (
    INDEX,
    MODEL,
    OPTIMIZER,
    Checkpoint,
    CheckpointProgress,
    WrittenCheckpoint,
    load,
    load_written,
    rewrite_index,
    save,
)
from p2ptrain.state.weights_files import (
    check_space,
    check_weights_file,
    save_elsewhere,
    save_weights,
)

PLACES = ("checkpoint.rename.before", "checkpoint.index.before", "checkpoint.index.after")


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def killed_at(place: str) -> Iterator[None]:
    def end(_: failpoints.Reached) -> None:
        raise Killed

    failpoints.arm(place, end)
    try:
        with pytest.raises(Killed):
            yield
    finally:
        failpoints.disarm()


def of(step: int, value: float = 0.0) -> Checkpoint:
    weights = {"w": torch.full((4,), value or float(step))}
    return Checkpoint(CheckpointProgress(step, "digest", 10, 2, 0, "SGD"), weights, {})


def whole(folder: Path) -> Checkpoint:
    """The newest, of which nothing is to be said."""
    warnings: list[str] = []
    found = load(folder, warnings.append)
    assert warnings == []
    return found


def value_of(written: WrittenCheckpoint) -> float:
    return load_written(written, lambda name: True)["model:w"][0].item()


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


@pytest.mark.parametrize("place", PLACES)
def test_who_dies_writing_a_step_again_leaves_a_whole_checkpoint(
    tmp_path: Path, place: str
) -> None:
    save(tmp_path, of(4))
    save(tmp_path, of(8, 1.0))
    with killed_at(place):
        save(tmp_path, of(8, 2.0))
    found = whole(tmp_path)
    assert found.progress.step == 8
    assert found.model["w"][0].item() == (2.0 if place == PLACES[-1] else 1.0)
    again = save(tmp_path, of(8, 3.0))
    assert whole(tmp_path).model["w"][0].item() == value_of(again) == 3.0
    assert len(folders(tmp_path)) <= 2


def test_a_step_may_be_written_again_and_again(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        assert value_of(save(tmp_path, of(8, value))) == value
        assert whole(tmp_path).model["w"][0].item() == value
    assert folders(tmp_path) == ["step-00000008", "step-00000008-again"]


def test_the_two_that_were_written_last_are_kept_however_high_older_ones_are(
    tmp_path: Path,
) -> None:
    """In the folder of another job, whose training was longer."""
    for step in (500, 510):
        save(tmp_path, of(step))
    written = [save(tmp_path, of(step)) for step in (10, 20)]
    assert [value_of(one) for one in written] == [10.0, 20.0]
    assert folders(tmp_path) == ["step-00000010", "step-00000020"]


def test_what_is_said_again_is_said_of_the_newest_step_alone(tmp_path: Path) -> None:
    written, progress = save(tmp_path, of(8)), of(8).progress
    rewrite_index(tmp_path, replace(of(4).progress, evaluated=4))
    assert whole(tmp_path).progress == progress
    rewrite_index(tmp_path, replace(progress, evaluated=8))
    assert whole(tmp_path).progress == replace(progress, evaluated=8)
    assert value_of(written) == whole(tmp_path).model["w"][0].item() == 8.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", "8"), ("step", -1), ("step", None), ("samples", 2.5), ("evaluated", True)],
)
def test_an_index_with_a_number_that_is_none_is_refused(
    tmp_path: Path, field: str, value: object
) -> None:
    save(tmp_path, of(8))
    for place in (tmp_path, *tmp_path.glob("step-*")):
        index = open_json((place / INDEX).read_bytes())
        index["progress"][field] = value
        (place / INDEX).write_bytes(seal_json(index))
    with pytest.raises(OptionError, match=r"is not a p2ptrain checkpoint: .* not whole numbers"):
        whole(tmp_path)


@pytest.mark.parametrize("value", [["step-00000008"], {}, None, 8])
def test_an_index_that_names_no_folder_is_refused(tmp_path: Path, value: object) -> None:
    save(tmp_path, of(8))
    for place in (tmp_path, *tmp_path.glob("step-*")):
        index = open_json((place / INDEX).read_bytes())
        (place / INDEX).write_bytes(seal_json({**index, "folder": value}))
    with pytest.raises(OptionError, match="names no folder"):
        whole(tmp_path)


@pytest.mark.parametrize("name", [INDEX, MODEL, OPTIMIZER])
def test_the_newest_whole_one_is_taken_and_the_damaged_one_named(tmp_path: Path, name: str) -> None:
    """R21: any bit, and any cut, of any of its files."""
    save(tmp_path, of(4))
    save(tmp_path, of(8))
    file = tmp_path / "step-00000008" / name
    content, draw = file.read_bytes(), Random(8)
    damages = [content[: draw.randrange(len(content))] for _ in range(20)]
    for _ in range(100):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        damages.append(bytes(flipped))
    for damaged in damages:
        file.write_bytes(damaged)
        warnings: list[str] = []
        found = load(tmp_path, warnings.append)
        if name == INDEX:  # the folder's own index says the same
            assert (found.progress.step, warnings) == (8, [])
            continue
        assert found.progress.step == 4
        assert found.model["w"][0].item() == 4.0
        [warning] = warnings
        assert "step-00000008" in warning
        assert "continuing from the checkpoint of step 4" in warning


def test_a_damaged_index_costs_no_checkpoint(tmp_path: Path) -> None:
    """Another step, seed or digest would be believed otherwise."""
    save(tmp_path, of(4))
    save(tmp_path, of(8))
    content, draw = (tmp_path / INDEX).read_bytes(), Random(3)
    for _ in range(100):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        (tmp_path / INDEX).write_bytes(bytes(flipped))
        warnings: list[str] = []
        assert load(tmp_path, warnings.append).progress == of(8).progress
        [warning] = warnings
        assert f"{tmp_path / INDEX} is " in warning


def test_where_nothing_is_whole_the_newest_is_named(tmp_path: Path) -> None:
    for step in (4, 8):
        save(tmp_path, of(step))
        (tmp_path / f"step-{step:08d}" / MODEL).write_bytes(b"")
    warnings: list[str] = []
    with pytest.raises(OptionError, match=r"step-00000008.* is damaged"):
        load(tmp_path, warnings.append)
    assert warnings == []


def test_a_checkpoint_of_an_older_version_is_read(tmp_path: Path) -> None:
    save(tmp_path, of(8))
    index = open_json((tmp_path / INDEX).read_bytes())
    del index["serial"]
    (tmp_path / INDEX).write_text(json.dumps(index, indent=1))
    (tmp_path / "step-00000008" / INDEX).unlink()
    assert whole(tmp_path).model["w"][0].item() == 8.0
    save(tmp_path, of(12))
    assert whole(tmp_path).progress.step == 12


def test_weights_are_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link, file = tmp_path / "w.safetensors", tmp_path / "disk" / "weights.safetensors"
    link.symlink_to(file)
    for value in (1.0, 2.0):  # a file that is not there yet, and one that is
        check_weights_file(link)
        save_weights(link, {"w": torch.full((2,), value)})
        assert link.is_symlink()
        assert load_file(file)["w"][0].item() == value
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OptionError, match=r"the weights cannot be written to .*/a: "):
        check_weights_file(tmp_path / "a")


def test_who_may_read_other_files_may_read_weights(tmp_path: Path) -> None:
    save_weights(tmp_path / "w.safetensors", {"w": torch.ones(2)})
    (tmp_path / "other").touch()
    assert (tmp_path / "w.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_weights_are_written_from_where_they_are_and_shared_ones_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from a second copy of the whole model."""
    given: dict[str, torch.Tensor] = {}

    def spy(tensors: dict[str, torch.Tensor], path: Path) -> None:
        given.update(tensors)
        save_file(tensors, path)

    monkeypatch.setattr(weights_files, "save_file", spy)
    both, alone, columns = torch.arange(8.0), torch.ones(3), torch.arange(6.0).view(2, 3)
    tensors = {
        "first": both[:4],
        "last": both[4:],
        "tied": both[:4],
        "overlaps": both[3:6],
        "alone": alone,
        "across": columns.t(),
        "none": torch.zeros(0),
    }
    save_weights(tmp_path / "w.safetensors", tensors)
    found = load_file(tmp_path / "w.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    here = {name for name in tensors if given[name].data_ptr() == tensors[name].data_ptr()}
    assert here == {"first", "alone", "last", "none"}


def test_too_little_room_is_found_before_anything_is_written(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    check_space({tmp_path: 1, tmp_path / "not there": 2 * free})
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(OptionError, match=r"too little space on the disk of .*B are free"):
        check_space({tmp_path: free // 2 + 1, other: free})


def test_weights_that_cannot_be_written_go_elsewhere_and_over_nothing(tmp_path: Path) -> None:
    tensors = {"weight": torch.ones(3)}
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    (tmp_path / "w.safetensors").write_text("mine")
    place = save_elsewhere("w.safetensors", tensors, (None, no_folder, tmp_path))
    assert place == tmp_path / "1-w.safetensors"
    assert torch.equal(load_file(place)["weight"], tensors["weight"])
    assert (tmp_path / "w.safetensors").read_text() == "mine"
    assert save_elsewhere("w.safetensors", tensors, (no_folder,)) is None


def test_a_folder_that_takes_no_checkpoints_is_found_at_once(tmp_path: Path) -> None:
    checkpoint_files.check_folder(tmp_path / "new")
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="checkpoints cannot be written to"):
        checkpoint_files.check_folder(tmp_path / "file")
