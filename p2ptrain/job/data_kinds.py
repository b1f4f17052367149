"""What a Job's data may be: a dataset, an iterable one, a DataLoader, or what gives batches.

map-style dataset, list     samples by index; p2ptrain orders them, `batch_size` a mini-batch
iterable dataset            samples in its own order, `batch_size` a mini-batch
DataLoader, other iterables batches; each is a mini-batch
"""

from __future__ import annotations

import operator
from typing import Any, Protocol

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset

from p2ptrain.errors import OptionError, ScriptError
from p2ptrain.job.user_code import describe_user_error


class MapDataset(Protocol):
    """A map-style dataset: samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def is_map_style(data: object) -> bool:
    """Whether samples are read by their index."""
    if isinstance(data, (DataLoader, IterableDataset, str, bytes)):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def gives_samples(data: object) -> bool:
    """Whether it is gone through sample by sample, and batches are made of them."""
    return isinstance(data, IterableDataset)


def size_of_batches(data: object, given: Any) -> int:
    """Samples of one mini-batch; 0 where the data's own batches may have any size.

    Args:
        given: `batch_size` as the job has it; None = it has none.

    Raises:
        OptionError: there must be one, or the loader has another one.
    """
    if is_map_style(data) or gives_samples(data):
        if given is None:
            raise OptionError(
                "Job: batch_size is missing: the samples of one update. (Of a DataLoader it is the "
                "loader's own)"
            )
        return _whole(given)
    own = getattr(data, "batch_size", None) if isinstance(data, DataLoader) else None
    if not given:
        return own or 0
    if own is None:
        return _whole(given)
    if _whole(given) != own:
        raise OptionError(
            f"Job: batch_size is {given}, but the DataLoader's is {own}: its own batches are the "
            "mini-batches. Set it there, and leave it out here"
        )
    return int(own)


def refuse_batch_size(data: object, batch_size: int) -> None:
    """Raises OptionError: the user gives a size to batches that have their own."""
    if batch_size and not is_map_style(data) and not gives_samples(data):
        own = getattr(data, "batch_size", None) if isinstance(data, DataLoader) else None
        if own is None:
            raise OptionError(
                "Job: batch_size is for datasets; the batches of this loader are the mini-batches "
                "as they are: leave it out"
            )


def _whole(value: Any) -> int:
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise OptionError(f"Job: batch_size must be a whole number, not {value!r}")
    if found < 1:
        raise OptionError(f"Job: batch_size must be at least 1, not {found}")
    return found


def updates_in(data: object, batch_size: int) -> int | None:
    """Updates of one epoch, as far as the data says; None where it does not."""
    if is_map_style(data):
        return len(data) // batch_size  # type: ignore[arg-type]
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        try:
            return len(data)
        except (TypeError, NotImplementedError):
            return None
    return None


def check_data(name: str, data: object) -> None:
    """Raises ScriptError: it is nothing to train on."""
    if not is_map_style(data):
        if isinstance(data, (str, bytes)) or not hasattr(data, "__iter__"):
            raise ScriptError(
                f"Job: {name} must be a dataset (__len__ and __getitem__), an iterable one or a "
                f"DataLoader, not {type(data).__name__}"
            )
        return
    length = _length(name, data)
    if length == 0:
        raise ScriptError(f"Job: {name} is empty")
    if isinstance(data, (tuple, list)) and length == 2 and all(map(_is_column, data)):
        raise ScriptError(
            f"Job: {name} is a pair of tensors, not samples: write "
            "torch.utils.data.TensorDataset(x, y)"
        )


def _is_column(value: object) -> bool:
    """Whether it is all inputs, or all targets, rather than a sample."""
    return isinstance(value, (torch.Tensor, numpy.ndarray)) and value.ndim > 0 and len(value) > 2


def _length(name: str, data: Any) -> int:
    try:
        return len(data)
    except Exception as error:
        raise ScriptError(f"Job: len({name}) failed: {describe_user_error(error)}") from error


def check_fits(samples: int, batch_size: int) -> None:
    """Raises ScriptError: so many samples are no batch."""
    if samples < batch_size:
        raise ScriptError(
            f"Job: data has {samples} samples, fewer than one batch of {batch_size}; "
            "choose a smaller batch_size"
        )
