"""Weights as safetensors files: written whole or not at all, and checked for room before.

A file is written under a temporary name, flushed to the disk and renamed. No two tensors in it
share memory, which the format requires.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from p2ptrain.errors import OptionError, TrainingError, size_text
from p2ptrain.files import replace_file, where_links_lead
from p2ptrain.logs import get_logger

log = get_logger(__name__)


def check_weights_file(path: Path) -> None:
    """Find out now what would be in the way of `save_weights` in the end.

    Raises:
        OptionError: nothing can be written there.
    """
    try:
        partial = partial_path(where_links_lead(path))
        probe = partial.with_name(f"{partial.name}.probe")  # `partial` may be being written
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OptionError(f"the weights cannot be written to {path}: {reason_of(error)}") from error


def average_path(path: Path) -> Path:
    """Where the average of the weights stands that are in `path`."""
    return path.with_name(f"{path.name.removesuffix('.safetensors')}.ema.safetensors")


def check_space(wanted: Mapping[Path, int]) -> None:
    """Find out now whether there is room for what will be written: folder -> bytes.

    Raises:
        OptionError: a disk has less left; what is on the same one is counted together.
    """
    needed: dict[int, int] = {}
    for folder, size in wanted.items():
        try:
            disk, free = folder.stat().st_dev, shutil.disk_usage(folder).free
        except OSError:  # writing says it
            continue
        needed[disk] = needed.get(disk, 0) + size
        if needed[disk] > free:
            raise OptionError(
                f"too little space on the disk of {folder}: {size_text(needed[disk])} are needed, "
                f"and {size_text(free)} are free. Free some, or give another folder"
            )


def save_elsewhere(
    name: str, tensors: Mapping[str, Tensor], folders: Iterable[Path | None]
) -> Path | None:
    """`save_weights` to the first of these folders that takes them; None where none does."""
    for folder in folders:
        if folder is None:
            continue
        place = next(
            path
            for number in count()
            if not (path := folder / (f"{number}-{name}" if number else name)).exists()
        )
        try:
            save_weights(place, tensors)
        except TrainingError as error:
            log.warning("weights_not_written", place=str(place), why=str(error))
        else:
            return place
    return None


def save_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a state_dict as one safetensors file, whole or not at all; a link is followed.

    Raises:
        TrainingError: it cannot be written.
    """
    partial = partial_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        place = where_links_lead(path)
        partial = partial_path(place)
        write_tensors(partial, tensors)
        replace_file(partial, place)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):  # the folder may be no folder any more
            partial.unlink()
        raise TrainingError(f"could not write the weights to {path}: {reason_of(error)}") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write, flush to the disk, and return the file's SHA-256."""
    path.touch()
    mode = path.stat().st_mode
    save_file(_unshared(tensors), path)  # in a file that only its owner may read
    path.chmod(stat.S_IMODE(mode))
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return file_sha256(path)


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values, of which no two share memory; copied only where they did."""
    found, end = {}, 0
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    for name in sorted(whole, key=lambda name: (whole[name].data_ptr(), name)):
        tensor = whole[name]
        if tensor.data_ptr() < end:
            found[name] = tensor.clone()
        else:
            found[name], end = tensor, tensor.data_ptr() + tensor.nbytes
    return found


def partial_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reason_of(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
