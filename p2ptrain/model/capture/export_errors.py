"""Why a model cannot be exported, explained to its author.

`torch.export` explains itself in terms of its own internals. Here the user's file and line are
found in the traceback, and the usual causes are named together with what to write instead: for
batch sizes fixed by the model, for Python that depends on values, and for torch's control flow,
whose branches and loops are no plain operators.
"""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from torch import nn
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
)

from p2ptrain.errors import CaptureError
from p2ptrain.model.capture.trial_runs import BatchSizeRead, TrialRuns
from p2ptrain.model.tracing.function_modes import BatchLength
from p2ptrain.model.tracing.value_decisions import OURS, TORCH, only_checks

_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]

_OTHER_BATCH = 9
"""Samples: odd, and not what torch.export has traced with."""

_INSTALLED = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])

_DATA_DEPENDENT = (
    "the model decides in Python on the values of a tensor (an `if`, a loop, an index), which "
    "differ from batch to batch. Use torch.where, a mask, or a shape that does not depend on values"
)

_SELECTED = (
    "the model decides in Python on how many elements of a tensor are selected (by nonzero, "
    "torch.where or a mask), which differs from batch to batch. An `if` that skips the work where "
    "none is can be left out: operations on no elements do nothing. Else compute for all samples "
    "and choose with torch.where"
)

_CHECKS_VALUES = (
    "the model checks the values of a tensor in Python (an assertion, an `if` that raises), and a "
    "trace has no values. Write the check with tensors, as in `assert (x > 0).all()`, or leave it "
    "out: a loss that is not finite ends the training anyway, with a message that names the layer"
)

_FIXED_BATCH = (
    "the model works for one batch size only. Use x.shape[0] or -1 where the batch size is written "
    "as a number, and no `if` on it"
)

_PYTHON_NUMBER = (
    "the model works for one batch size only: Python itself takes it as a plain number here (a "
    "list as long as the batch, range(), int()). Make a tensor of that length instead: "
    "torch.arange(n), torch.full((n,), value), x.new_zeros(n), row.expand(n, -1)"
)

_SOME_BATCHES = (
    "the model does not do the same for all batch sizes, if it is not made for one batch size only."
    " Let nothing hang on x.shape[0]: no `if` on it, and no operator that does something else then"
)

_BATCH_LENGTH = (
    "a loop over the samples of a batch, or a number that Python itself takes of it, fixes the "
    "batch size. Use x.shape[0] and operations on the whole batch"
)

_DIFFERENTIATES = (
    "forward() or the loss differentiates by itself (torch.autograd.grad), and torch.export cannot "
    "follow that through one of the operators. Write the derivative out"
)

_BYTORCH_FUNCTION = {
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

Bounds: TypeAlias = tuple[int, int | None]
"""The fewest and the most samples of a batch that a graph is for; None: any number."""

_SUGGESTED = re.compile(r"batch = Dim\('batch'(?:, min=(\d+))?(?:, max=(\d+))?\)")

_GUARD, _CONSTANT = "satisfy the generated guard", "specialized it to be a constant"

_TRIED_MINIMA = (3, 8)

_MAKES_NUMBER = ("__index__", "__int__")

_SIZE = re.compile(r"L\['(?:inputs|targets)'\]\[\d+\]\.size\(\)\[0\]")


class LossRefuses(CaptureError):
    """The loss fails on what the model gives in evaluation mode; the message says where and how."""


class FailsItself(CaptureError):
    """Module or loss fails without any trace too, with every number of samples that was tried.

    Attributes:
        own: what it raises.
    """

    def __init__(self, own: Exception) -> None:
        description = " ".join(filter(None, (_at(user_place(own)), _in_layer(own))))
        super().__init__(
            "the model or its loss fails on the first samples of the data, in plain torch too: "
            f"{description + ': ' if description else ''}{_informative_line(own)}"
        )
        self.own = own


def explain(error: Exception, trials: TrialRuns) -> CaptureError:
    """The `CaptureError` for an `error` of torch.export.

    Args:
        error: what torch.export raised.
        trials: runs the model with other batch sizes, which shows what torch.export's own error
            does not name: the line that works with one of them only.
    """
    if isinstance(error, CaptureError):
        return error
    cause, where = _cause(error), _at(user_place(error))
    if cause is _SOME_BATCHES:
        where = _where_asked(trials, fixes=False) or where
    if cause is _FIXED_BATCH:
        place = _at(_place_of_other_batch(trials))
        cause = cause if place else _of_fixing(trials.asking(fixes=True))
        where = place or _where_asked(trials, fixes=True) or where
    if cause in (_NOT_TRACEABLE, _FIXED_BATCH) and (divisor := trials.divisor()) is not None:
        cause = _multiples_only(divisor)
        where = _at(_place_of_other_batch(trials)) or where
    if cause is _NOT_TRACEABLE:
        own = trials.in_plain_torch()
        if own is not None and not isinstance(own, CaptureError):
            return FailsItself(apart_from(own, error))
    description = f"{where}: " if where else ""
    return CaptureError(
        f"the model cannot be captured: {description}{cause}. ({_informative_line(error)})"
    )


def _in_layer(error: BaseException) -> str:
    """The innermost layer of torch's own that `error` was raised in, with its sizes."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = [frame.f_locals.get("self") for frame in frames]
    layers = [o for o in owners if type(o).__module__.startswith("torch.nn.modules")]
    leaves = [o for o in layers if isinstance(o, nn.Module) and not list(o.children())]
    return f"in {str(leaves[-1])[:120]}" if leaves else ""


def next_bounds(error: Exception, bounds: Bounds) -> Bounds | None:
    """For how many samples to export again; None where that is not why it failed.

    torch.export says for how many, or only that it could not show something for all numbers, which
    may be true from a few more on.

    Args:
        error: what torch.export raised, asked for `bounds`.
    """
    least, most = bounds
    texts = [str(link) for link in _chain(error)]
    found = next(filter(None, map(_SUGGESTED.search, texts)), None)
    if found is not None:
        suggested = int(found[1] or least), int(found[2]) if found[2] else most
        return suggested if suggested != bounds else None
    is_unshown = any(_GUARD in text and _CONSTANT not in text for text in texts)
    few = next((few for few in _TRIED_MINIMA if few > least), None)
    return (few, most) if is_unshown and few is not None else None


def _multiples_only(divisor: int) -> str:
    return (
        f"the model works only for batches that can be divided by {divisor}, and micro-batches may "
        "have any size. Let each sample of the data hold all that belongs together"
    )


def refusal(error: Exception) -> str:
    """Where the user's code refuses something, and with what words."""
    place = user_place(error)
    return f"at {place}: {_informative_line(error)}" if place else _informative_line(error)


def _cause(error: BaseException) -> str:
    for link in _chain(error):
        text = str(link)
        if isinstance(link, BatchLength):
            return _BATCH_LENGTH
        if _is_of_values(link):
            return _of_torch_layer(link) or _of_values(
                error, is_number="Size-like symbols: u" in text
            )
        if "found a fake tensor in the exported program" in text or "functorch" in text:
            return _DIFFERENTIATES
        if isinstance(link, ConstraintViolationError) or "Constraints violated" in text:
            return _SOME_BATCHES if _GUARD in text and _CONSTANT not in text else _FIXED_BATCH
        if "is invalid for input of size" in text:
            return _FIXED_BATCH
    return _NOT_TRACEABLE


def is_of_values(error: BaseException) -> bool:
    """Whether the model decides on values of tensors, which a trace has not."""
    return any(map(_is_of_values, _chain(error)))


def _is_of_values(link: BaseException) -> bool:
    return isinstance(link, GuardOnDataDependentSymNode) or "data-dependent" in str(link)


def _of_values(error: BaseException, *, is_number: bool) -> str:
    """Of an `error` over the values of a tensor; `is_number`: over how many were selected."""
    frame = _user_frame(_raised_in(error))
    if frame is not None and only_checks(frame.filename, frame.lineno or 0):
        return _CHECKS_VALUES
    return _SELECTED if is_number else _DATA_DEPENDENT


def _of_torch_layer(error: BaseException) -> str | None:
    for frame in traceback.extract_tb(error.__traceback__):
        description = _BYTORCH_FUNCTION.get((Path(frame.filename).name, frame.name))
        if description is not None and frame.filename.startswith(TORCH):
            return description
    return None


def _place_of_other_batch(trials: TrialRuns) -> str | None:
    error = trials.failure(_OTHER_BATCH)
    return None if error is None else user_place(error)


def _where_asked(trials: TrialRuns, *, fixes: bool) -> str:
    """The user's line that asks for the batch's size."""
    asking = trials.asking(fixes=fixes)
    return "" if asking is None else _at(_place(asking.stack))


def _of_fixing(asking: BatchSizeRead | None) -> str:
    """Why the batch size is one number, where no line of the user's own fails with another one."""
    if asking is None:
        return _FIXED_BATCH
    operator = control_flow_in(asking.stack)
    if operator is not None:
        return f"p2ptrain does not carry {operator} to other devices. {control_flow_hint(operator)}"
    if _is_taken_by_python(asking.stack):
        return _PYTHON_NUMBER
    layer = type(asking.module)
    if not layer.__module__.startswith("torch.nn."):
        return _FIXED_BATCH
    return (
        f"torch's {layer.__name__} takes one batch size only when torch.export sees it. Use "
        "another layer, or write what it does with torch's operators"
    )


def _is_taken_by_python(stack: Sequence[traceback.FrameSummary]) -> bool:
    """Whether a line of the user's makes a plain number of a size."""
    return any(
        is_own(caller.filename) and called.name in _MAKES_NUMBER
        for caller, called in pairwise(stack)
    )


def _at(place: str | None) -> str:
    return "" if place is None else f"at {place}"


def user_place(error: BaseException) -> str | None:
    """The user's innermost "file:line (`code`)" in the traceback, and a library's that it calls."""
    return _place(_raised_in(error))


def _place(stack: Iterable[traceback.FrameSummary]) -> str | None:
    frames = list(stack)
    frame = _user_frame(frames)
    if frame is None:
        return None
    behind = [one for one in frames[frames.index(frame) + 1 :] if _is_library(one.filename)]
    return _line(frame) + (f", in {_line(behind[-1])}" if behind else "")


def _line(frame: traceback.FrameSummary) -> str:
    code = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno} (`{code}`)"


def _raised_in(error: BaseException) -> Iterator[traceback.FrameSummary]:
    return (frame for link in _chain(error) for frame in traceback.extract_tb(link.__traceback__))


def _user_frame(stack: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    frames = [frame for frame in stack if not frame.filename.startswith((TORCH, OURS, "<"))]
    own = [frame for frame in frames if is_own(frame.filename)]
    libraries = [frame for frame in frames if frame.filename.startswith(_INSTALLED)]
    return (own or libraries)[-1] if own or libraries else None


def _is_library(filename: str) -> bool:
    return filename.startswith(_INSTALLED) and not filename.startswith((TORCH, OURS))


def is_own(filename: str) -> bool:
    """Whether the user wrote that file: it is no library's, and was not made while tracing."""
    return not filename.startswith((*_INSTALLED, _STANDARD_LIBRARY, TORCH, OURS, "<"))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, then what it came from, at most 16 of them."""
    link: BaseException | None = error
    for _ in range(16):
        if link is None:
            return
        yield link
        link = link.__cause__ or link.__context__


def apart_from(error: Exception, handled: BaseException | None) -> Exception:
    """`error`, raised while another one was handled that it has nothing to do with."""
    for link in _chain(error):
        if link.__context__ is handled:
            link.__context__ = None
    return error


def _informative_line(error: BaseException) -> str:
    """The first; of a batch size that torch.export refuses, the one that says which."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    guards = [line for line in lines if _GUARD in line]
    line = _SIZE.sub("batch", guards[0].lstrip("- ")) if guards else lines[0]
    return f"{type(error).__name__}: {line[:300]}"


_FOLDER = "_higher_order_ops"

_A_LOOP = "a Python loop over that dimension, whose number of steps is the same for every batch"

_INSTEAD: Mapping[str, str] = {
    "cond": "Compute both branches and choose: torch.where(condition, one, other)",
    "while_loop": (
        "Use a Python loop with as many steps as may be needed, and torch.where(done, value, next) "
        "in it"
    ),
    "scan": f"Use {_A_LOOP}",
    "map": "Use torch.vmap, or operations on the whole batch",
    "associative_scan": f"Use torch.cumsum, cumprod or cummax where it is one, or {_A_LOOP}",
}


def control_flow_hint(name: str) -> str | None:
    """What to write instead of the operator `name`; None where it is none of these."""
    return _INSTEAD.get(name.removesuffix("_impl"))


def control_flow_in(stack: Iterable[traceback.FrameSummary]) -> str | None:
    """The name of the first of these operators that a call stack, outermost frame first, enters."""
    files = (Path(frame.filename) for frame in stack)
    inside = (file.stem for file in files if file.parent.name == _FOLDER)
    return next((name for name in inside if name in _INSTEAD), None)
