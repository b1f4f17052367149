"""Checkpoints on disk: complete or absent, and never mistaken for another job's.

    DIR/
      checkpoint.json          which folder is the newest whole one, and what it holds
      step-00000120/
        checkpoint.json        what this folder holds, with the SHA-256 of its files
        model.safetensors      the user's state_dict (tied names once)
        optimizer.safetensors  "<parameter>.<slot>"

A new folder is written and flushed under a temporary name, renamed, and only then named by
`checkpoint.json`, which is replaced atomically; the folder that it named before is kept, others are
deleted. What it names is never replaced: a step that is written again after a restart has a folder
`step-00000120-again`. So a full disk or a power cut leaves the last checkpoint as it was. Both
indexes are sealed (files.py). If the newest checkpoint is damaged, the newest whole one is used,
with a warning.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from p2ptrain import failpoints
from p2ptrain.errors import OptionError, TrainingError
from p2ptrain.files import SealBroken, open_json, replace_file, seal_json
from p2ptrain.logs import get_logger
from p2ptrain.state.weights_files import file_sha256, partial_path, reason_of, write_tensors

log = get_logger(__name__)

FORMAT = "p2ptrain.checkpoint/1"

INDEX = "checkpoint.json"

MODEL = "model.safetensors"

OPTIMIZER = "optimizer.safetensors"

KEPT = 2
"""Folders: the newest and the one before."""

_HERE = ""
"""For failpoints: the writer has the data, and does not know its own id here."""


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """Where a job stands, and what must be the same for it to go on.

    Attributes:
        step: updates applied.
        digest: of the names, types and shapes of the model's weights.
        samples, batch_size, seed: fix which samples an update sees.
        optimizer: its name.
        evaluated: the highest step whose evaluation was reported; None in files that do not say.
        measured: what a scheduler has seen of evaluations: after how many updates, and the metric
            as `float.hex` writes it.
        scales: where the loss scale changed last: after how many updates, and to what.
        loader: how far the loader was, as the holder writes it.
    """

    step: int
    digest: str
    samples: int
    batch_size: int
    seed: int
    optimizer: str
    evaluated: int | None = None
    measured: tuple[tuple[int, str], ...] = ()
    scales: tuple[tuple[int, float], ...] = ()
    loader: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A job's state between two updates."""

    progress: CheckpointProgress
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


Sums: TypeAlias = Mapping[str, int]
"""CRC-32 of the bytes of tensors, by `model:<name>` and `optimizer:<parameter>.<slot>`."""


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint that is on the disk, whole.

    Attributes:
        place: its folder; one of the last KEPT that this job wrote is there still.
        sums: what `load_written` holds it against.
    """

    place: Path
    sums: Sums


def save(folder: Path, checkpoint: Checkpoint) -> WrittenCheckpoint:
    """Write `checkpoint` as the newest of `folder`.

    Raises:
        TrainingError: the disk is full or the folder cannot be written; what was there stays.
    """
    before = _newest(folder)
    name = f"step-{checkpoint.progress.step:08d}"
    if name == before:
        name = f"{name}-again"
    partial = folder / f".{name}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        digests = {
            MODEL: write_tensors(partial / MODEL, checkpoint.model),
            OPTIMIZER: write_tensors(partial / OPTIMIZER, checkpoint.optimizer),
        }
        index = {
            "format": FORMAT,
            "folder": name,
            "sha256": digests,
            "progress": asdict(checkpoint.progress),
            "serial": max(map(_serial, folder.glob("step-*")), default=0) + 1,
        }
        _replace(partial / INDEX, seal_json(index))
        final = folder / name
        shutil.rmtree(final, ignore_errors=True)
        failpoints.reach_now("checkpoint.rename.before", device=_HERE)
        partial.rename(final)
        failpoints.reach_now("checkpoint.index.before", device=_HERE)
        _replace(folder / INDEX, seal_json(index))
        failpoints.reach_now("checkpoint.index.after", device=_HERE)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise TrainingError(
            f"could not write a checkpoint to {folder}: {reason_of(error)}; the previous "
            "checkpoint is still complete. Free some space or give another folder, then continue "
            "with --resume"
        ) from error
    _remove_others(folder, keep=(name, before))
    kinds = (("model", checkpoint.model), ("optimizer", checkpoint.optimizer))
    sums = {f"{kind}:{key}": _sum(t) for kind, tensors in kinds for key, t in tensors.items()}
    return WrittenCheckpoint(final, sums)


def rewrite_index(folder: Path, progress: CheckpointProgress) -> None:
    """Where the newest checkpoint of `folder` is of that step: what it says of the job.

    Raises:
        OptionError: there is none.
        TrainingError: it cannot be written; what was there stays.
    """
    index = _read_index(folder)
    if dict(index["progress"]).get("step") != progress.step:
        return
    index["progress"] = asdict(progress)
    try:
        _replace(folder / INDEX, seal_json(index))
    except OSError as error:
        raise TrainingError(f"could not write to {folder}: {reason_of(error)}") from error


def load(folder: Path, warn: Callable[[str], None]) -> Checkpoint:
    """Read the newest whole checkpoint of `folder`.

    Args:
        folder: where `save` wrote them.
        warn: called with newer ones that are damaged, if there is a whole one.

    Raises:
        OptionError: there is none that is whole.
    """
    damages: list[OptionError] = []
    tried: set[object] = set()
    for place in (folder, *_newest_first(folder)):
        try:
            index = _read_index(place)
            if index.get("folder") in tried:
                continue
            tried.add(index.get("folder"))
            found = _read_of(folder, index, place / INDEX)
        except OptionError as error:
            damages.append(error)
            continue
        for damage in damages:
            warn(f"{damage}: continuing from the checkpoint of step {found.progress.step} instead")
        return found
    raise damages[0]


def _newest_first(folder: Path) -> list[Path]:
    """The folders of single checkpoints; those that do not say when they were written come last."""
    return sorted(folder.glob("step-*"), key=_serial, reverse=True)


def _serial(place: Path) -> int:
    """Which checkpoint of its folder it is; 0 where it is damaged, or an older version's."""
    try:
        serial = _read_index(place).get("serial")
    except OptionError as error:
        log.info("no_index_of_its_own", why=str(error))
        return 0
    return serial if isinstance(serial, int) else 0


def _read_of(folder: Path, index: dict[str, Any], file: Path) -> Checkpoint:
    try:
        place = folder / str(index["folder"])
        progress = _checked(CheckpointProgress(**index["progress"]))
        digests = dict(index["sha256"])
    except (KeyError, TypeError, ValueError) as error:
        raise OptionError(f"{file} is not a p2ptrain checkpoint: {error}") from error
    if place.parent != folder:
        raise OptionError(f"{file} names a folder elsewhere")
    return Checkpoint(
        progress,
        _read(place / MODEL, digests.get(MODEL)),
        _read(place / OPTIMIZER, digests.get(OPTIMIZER)),
    )


def _checked(progress: CheckpointProgress) -> CheckpointProgress:
    """Raises ValueError: a number is none, which would come up much later."""
    counts = (progress.step, progress.samples, progress.batch_size, progress.evaluated or 0)
    if any(type(count) is not int or count < 0 for count in counts):
        raise ValueError(f"{counts} are not whole numbers of at least 0")
    measured = tuple((int(step), float.fromhex(metric).hex()) for step, metric in progress.measured)
    scales = tuple((int(step), float(scale)) for step, scale in progress.scales)
    return replace(progress, measured=measured, scales=scales)


def load_written(written: WrittenCheckpoint, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Some tensors of a checkpoint.

    Args:
        written: what `save` said of it.
        wanted: whether the tensors of that parameter or buffer are, the optimizer's included.

    Returns them by `model:<name>` and `optimizer:<parameter>.<slot>`, in memory of their own.

    Raises:
        OptionError: it cannot be read, or is not what was written.
    """
    place = written.place
    found: dict[str, Tensor] = {}
    try:
        with safe_open(place / MODEL, framework="pt") as file:
            for name in filter(wanted, sorted(file.keys())):
                found[f"model:{name}"] = file.get_tensor(name)
        with safe_open(place / OPTIMIZER, framework="pt") as file:
            for name in sorted(file.keys()):
                if wanted(name.rpartition(".")[0]):
                    found[f"optimizer:{name}"] = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise OptionError(f"cannot read the checkpoint in {place}: {reason_of(error)}") from error
    wrong = [name for name, tensor in found.items() if written.sums.get(name) != _sum(tensor)]
    if wrong:
        raise OptionError(f"the checkpoint in {place} is damaged: {wrong[0]} is not what it was")
    return found


def check_folder(folder: Path) -> None:
    """Find out now what would be in the way of `save`.

    Raises:
        OptionError: nothing can be written there.
    """
    partial = folder / ".p2ptrain.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise OptionError(
            f"checkpoints cannot be written to {folder}: {reason_of(error)}"
        ) from error


def _read(path: Path, digest: object) -> Mapping[str, Tensor]:
    try:
        if file_sha256(path) != digest:
            raise OptionError(f"{path} is damaged: its SHA-256 is not the one written down")
        tensors: Mapping[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise OptionError(f"cannot read {path}: {reason_of(error)}") from error
    return tensors


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = open_json(path.read_bytes())
    except FileNotFoundError:
        raise OptionError(f"there is no checkpoint in {folder}") from None
    except SealBroken as error:
        raise OptionError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise OptionError(f"cannot read {path}: {reason_of(error)}") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise OptionError(f"{path} is not of the format {FORMAT}")
    if not isinstance(index.get("folder"), str):
        raise OptionError(f"{path} names no folder")
    return index


def _replace(path: Path, content: bytes) -> None:
    partial = partial_path(path)
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    replace_file(partial, path)


def _newest(folder: Path) -> str:
    """What the index names; "" where it names nothing."""
    try:
        return str(_read_index(folder).get("folder", ""))
    except OptionError as error:
        log.info("no_checkpoint_before", why=str(error))
        return ""


def _remove_others(folder: Path, keep: Sequence[str]) -> None:
    """An older job's too, whose steps may be higher; what cannot be removed is only untidy."""
    for path in folder.glob("step-*"):
        if path.is_dir() and path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)


def _sum(tensor: Tensor) -> int:
    flat = tensor.detach().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
