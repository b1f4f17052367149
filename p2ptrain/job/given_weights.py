"""A job's `weights`: a safetensors file, or a folder of them with its index.

The model's tensors may be on "meta" until then: they get memory of their own, and stay the same
objects, so that an optimizer that was made for them still knows them. Names are those of the
model's state_dict. What the file does not have keeps its value, where it has one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from p2ptrain.errors import OptionError, ScriptError
from p2ptrain.model.graph.description import TensorDescription

_INDEX_BYTES = 64 << 20


def check_weights(model: nn.Module, weights: object) -> Path | None:
    """The file or folder of a job that has one.

    Raises:
        OptionError: it cannot be read.
        ScriptError: it is of another model, or a tensor on "meta" has no value there.
    """
    if weights is None:
        _refuse_missing(model, ())
        return None
    if not isinstance(weights, str | os.PathLike):
        raise OptionError(f"Job: weights must be a file or folder, not {type(weights).__name__}")
    path = Path(weights)
    names = files_of(path)
    own = _tensors(model)
    unknown = [name for name in names if name not in own]
    if unknown:
        raise ScriptError(
            f"Job: {path} has {_listed(unknown)}, which the model does not have: is it another "
            "model's?"
        )
    _refuse_missing(model, tuple(names), path)
    for file in dict.fromkeys(names.values()):
        with _opened(file) as stored:
            for name in (n for n, where in names.items() if where == file):
                shape, wanted = tuple(stored.get_slice(name).get_shape()), tuple(own[name].shape)
                if shape != wanted:
                    raise ScriptError(
                        f"Job: {name!r} has shape {list(shape)} in {path}, and {list(wanted)} in "
                        "the model"
                    )
    return path


def load_weights(model: nn.Module, path: Path) -> None:
    """Write them into the model's own tensors, one after the other.

    Raises:
        OptionError: it cannot be read any more.
    """
    for tensor in _all_tensors(model):
        if tensor.is_meta:
            _give_memory(tensor)
    names, own = files_of(path), _tensors(model)
    for file in dict.fromkeys(names.values()):
        with _opened(file) as stored, torch.no_grad():
            for name in (n for n, where in names.items() if where == file):
                own[name].copy_(stored.get_tensor(name))


def hint_of(path: Path, most: int) -> str:
    """Where other devices may have the same files: in the home folder, if they are in this one's.

    "" where that takes more than `most` characters, or is no text.
    """
    path, home = path.absolute(), Path.home()
    in_home = path.is_relative_to(home)
    hint = f"~/{path.relative_to(home).as_posix()}" if in_home else path.as_posix()
    return hint if len(hint) <= most and hint.isprintable() else ""


def stored_here(hint: str, wanted: Mapping[str, TensorDescription]) -> dict[str, Tensor]:
    """What of `wanted`, by its name in a file, is in this device's own files at `hint`.

    Whoever gives the hint may be wrong about what is there: compare with digests. Never raises for
    what is not there, or is no file of weights.
    """
    found: dict[str, Tensor] = {}
    path = Path.home() / hint[2:] if hint.startswith("~/") else Path(hint)
    if not path.is_absolute() or ".." in path.parts or path.as_posix().startswith("//"):
        return found
    with suppress(OptionError, OSError, SafetensorError, ValueError):
        names = {n: file for n, file in files_of(path).items() if n in wanted and file.is_file()}
        for file in dict.fromkeys(names.values()):
            with _opened(file) as stored:
                for name in (n for n, where in names.items() if where == file):
                    if tuple(stored.get_slice(name).get_shape()) == wanted[name].shape:
                        read = stored.get_tensor(name)  # which may be the file itself
                        found[name] = read.to(wanted[name].dtype, copy=True)
    return found


def files_of(path: Path) -> dict[str, Path]:
    """The file of every tensor, by name.

    Raises:
        OptionError: there is none, or its index is none.
    """
    if not path.is_dir():
        if not path.is_file():
            raise OptionError(f"Job: weights: {path} cannot be read: there is no such file")
        with _opened(path) as stored:
            return dict.fromkeys(stored.keys(), path)
    indexes = sorted(path.glob("*.safetensors.index.json"))
    files = sorted(path.glob("*.safetensors"))
    if len(indexes) == 1:
        return {name: path / file for name, file in _index(indexes[0]).items()}
    if not indexes and len(files) == 1:
        return files_of(files[0])
    raise OptionError(
        f"Job: weights: {path} must have one *.safetensors.index.json, or one *.safetensors; it "
        f"has {len(indexes)} and {len(files)}"
    )


def _index(file: Path) -> Mapping[str, str]:
    try:
        if file.stat().st_size > _INDEX_BYTES:
            raise ValueError("it is too large")
        found = json.loads(file.read_text(encoding="utf-8"))
        named = found["weight_map"]
        good = all(isinstance(n, str) and Path(n).name == n for n in named.values())
        if not good:
            raise ValueError("its files must stand beside it")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OptionError(f"Job: weights: {file} is no index of weights: {error}") from error
    return dict(named)


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise OptionError(f"Job: weights: {file} cannot be read: {error}") from error


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _all_tensors(model: nn.Module) -> Sequence[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _refuse_missing(model: nn.Module, names: Sequence[str], path: Path | None = None) -> None:
    own = _tensors(model)
    there = {id(own[name]) for name in names}
    named = (*model.named_parameters(), *model.named_buffers())
    missing = [name for name, t in named if t.is_meta and id(t) not in there]
    if not missing:
        return
    if path is None:
        raise ScriptError(
            f"Job: the model is on the meta device, without values ({_listed(missing)}): give "
            'weights="model.safetensors", or make the model without torch.device("meta")'
        )
    raise ScriptError(
        f"Job: {path} has no {_listed(missing)}, which the model has on the meta device: make "
        'what is not in the file without torch.device("meta")'
    )


def _give_memory(tensor: Tensor) -> None:
    """The same object, with memory that nothing has been written to."""
    new = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
