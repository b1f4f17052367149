"""Why a model cannot be exported, in words for the person who wrote it.

`torch.export` explains itself to people who know its insides. Here the user's own file and line are
found in the traceback, and the usual causes are named with what to change.
"""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
)

from p2ptrain.errors import CaptureError
from p2ptrain.model.value_checks import only_checks

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_INSTALLED = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])

_DATA_DEPENDENT = (
    "the model decides in Python on the values of a tensor (an `if`, a loop, an index), which "
    "differ from batch to batch. Use torch.where, a mask, or a shape that does not depend on values"
)
_CHECKS_VALUES = (
    "the model checks the values of a tensor in Python (an assertion, an `if` that raises), and a "
    "trace has no values. Remove the check: a loss that is no finite number ends the training by "
    "itself, and says which unit it comes from"
)
_FIXED_BATCH = (
    "the model works for one batch size only. Use x.shape[0] or -1 where the batch size is written "
    "as a number, and no `if` on it"
)
_BATCH_LENGTH = (
    "len() of a batch, or a loop over its samples, fixes the batch size. Use x.shape[0] and "
    "operations on the whole batch"
)
_DIFFERENTIATES = (
    "forward() or the loss differentiates by itself (torch.autograd.grad, torch.func), and "
    "torch.export cannot follow that through operators such as tanh, exp or softmax. Write the "
    "derivative out"
)
_BY_TORCH_FUNCTION = {
    ("batchnorm.py", "forward"): (
        "a BatchNorm with momentum=None averages over all batches so far, which needs the value of "
        "its counter. Give it a momentum, such as 0.1"
    ),
}
"""Where torch's own layers decide on values, by file and function."""
_NOT_TRACEABLE = (
    "torch.export cannot follow this. Keep to tensor operations in forward(): no NumPy, no files, "
    "no random numbers of Python's own"
)


class LossRefuses(CaptureError):
    """The loss fails on what the model gives in evaluation mode; the message says where and how."""


class BatchLength(TypeError):
    """The number of samples was asked for as a plain number."""


def explain(error: Exception, probe: Callable[[], None]) -> CaptureError:
    """The `CaptureError` for an `error` of torch.export.

    Args:
        error: what torch.export raised.
        probe: runs the model with another batch size; where the batch size is fixed in the code it
            fails on the line in question, which torch.export's own error does not name.
    """
    if isinstance(error, CaptureError):
        return error
    cause = _cause(error)
    place = user_place(error)
    if cause is _FIXED_BATCH:
        place = _place_of_probe(probe) or place
    where = f"at {place}: " if place else ""
    return CaptureError(f"the model cannot be captured: {where}{cause}. ({_first_line(error)})")


def refusal(error: Exception) -> str:
    """Where the user's code refuses something, and with what words."""
    place = user_place(error)
    return f"at {place}: {_first_line(error)}" if place else _first_line(error)


def _cause(error: BaseException) -> str:
    for link in _chain(error):
        text = str(link)
        if isinstance(link, BatchLength):
            return _BATCH_LENGTH
        if isinstance(link, GuardOnDataDependentSymNode) or "data-dependent" in text:
            return _of_torch_layer(link) or _of_values(error)
        if "found a fake tensor in the exported program" in text or "functorch" in text:
            return _DIFFERENTIATES
        if isinstance(link, ConstraintViolationError) or "Constraints violated" in text:
            return _FIXED_BATCH
        if "is invalid for input of size" in text:
            return _FIXED_BATCH
    return _NOT_TRACEABLE


def _of_values(error: BaseException) -> str:
    frame = _user_frame(error)
    is_check = frame is not None and only_checks(frame.filename, frame.lineno or 0)
    return _CHECKS_VALUES if is_check else _DATA_DEPENDENT


def _of_torch_layer(error: BaseException) -> str | None:
    for frame in traceback.extract_tb(error.__traceback__):
        told = _BY_TORCH_FUNCTION.get((Path(frame.filename).name, frame.name))
        if told is not None and frame.filename.startswith(_TORCH):
            return told
    return None


def _place_of_probe(probe: Callable[[], None]) -> str | None:
    try:
        probe()
    except Exception as error:  # whatever it is, it only serves to find the line
        return user_place(error)
    return None


def user_place(error: BaseException) -> str | None:
    """The user's innermost "file:line (`code`)" in the traceback; a library's if there is none."""
    frame = _user_frame(error)
    if frame is None:
        return None
    code = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno} (`{code}`)"


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    frames = [
        frame
        for link in _chain(error)
        for frame in traceback.extract_tb(link.__traceback__)
        if not frame.filename.startswith((_TORCH, _OURS, "<"))
    ]
    own = [frame for frame in frames if is_own(frame.filename)]
    libraries = [frame for frame in frames if frame.filename.startswith(_INSTALLED)]
    return (own or libraries)[-1] if own or libraries else None


def is_own(filename: str) -> bool:
    """Whether the user wrote that file: it is no library's, and was not made while tracing."""
    return not filename.startswith((*_INSTALLED, _STANDARD_LIBRARY, _TORCH, _OURS, "<"))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, then what it came from, at most 16 of them."""
    link: BaseException | None = error
    for _ in range(16):
        if link is None:
            return
        yield link
        link = link.__cause__ or link.__context__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"
