"""Captures, made once for all equal models of a run of tests.

Capturing takes most of a small job's time, and hundreds of tests train the same few models. What is
captured follows from the model, the loss and the example alone, so equal ones share what was found;
each has its own tensors. The first is compared with its module in full, those after it on one
batch. Whatever cannot be compared is captured as ever.
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.capture.plain_run import ComparedBatches, PlainRun, Read, run_plainly
from p2ptrain.model.capture.scored_module import Loss, VaryingSize
from p2ptrain.model.graph.description import TensorKind


@dataclass(frozen=True)
class _Known:
    """The first model of its kind, and what capturing it gave."""

    module: nn.Module
    captured: Captured


_KNOWN: dict[bytes, _Known] = {}
_COMPARED: set[bytes] = set()


def captured(
    module: nn.Module,
    loss: Loss,
    example: tuple[Any, Any],
    *,
    evaluation: bool = True,
    autocast: torch.dtype | None = None,
    varying: tuple[VaryingSize, ...] = (),
) -> Captured:
    """As `capture`, which is only called where no equal model was captured before."""
    given: dict[str, Any] = {"evaluation": evaluation, "autocast": autocast, "varying": varying}
    key = _content(module, loss, example, given)
    if key is None:
        return capture(module, loss, example, **given)
    if key not in _KNOWN:
        made = capture(module, loss, example, **given)
        if not _owns_all(module, made):
            return made
        _KNOWN[key] = _Known(module, copy.copy(made))
        return made
    return _for_another(_KNOWN[key], module)


def computed_plainly(
    module: nn.Module,
    loss: Loss,
    read: Read,
    read_evaluation: Read | None,
    pieces: range,
    effort: ComparedBatches,
    *,
    autocast: torch.dtype | None = None,
    mini_batch: int = 0,
) -> PlainRun:
    """As `run_plainly`; of a model whose equal was compared in full, one batch."""
    key = _content(module, loss, autocast)
    if key is not None and key in _COMPARED:
        effort, read_evaluation = replace(effort, least=1, most=1), None
    elif key is not None:
        _COMPARED.add(key)
    return run_plainly(
        *(module, loss, read, read_evaluation, pieces, effort),
        autocast=autocast,
        mini_batch=mini_batch,
    )


def _content(*asked: object) -> bytes | None:
    """What makes two models the same, to the bit; None of what a test has defined for itself."""
    written = io.BytesIO()
    try:
        _Content(written).dump(asked)
    except Exception:  # whatever a part of it says of being written
        return None
    return hashlib.sha256(written.getvalue()).digest()


class _Content(pickle.Pickler):
    """Writes tensors so that equal ones are equal bytes, which torch's own way does not give."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: object) -> object:
        """Of a tensor all that capturing can see: also which are one, or share memory."""
        if not isinstance(obj, Tensor):
            return None
        memory = obj.untyped_storage().data_ptr()
        same = [self._numbers.setdefault(key, len(self._numbers)) for key in (id(obj), memory)]
        form = type(obj).__name__, obj.dtype, obj.shape, obj.stride(), obj.storage_offset()
        plain = obj.detach().contiguous().flatten().view(torch.uint8)
        return *same, *form, obj.requires_grad, plain.numpy().tobytes()


def _owns_all(module: nn.Module, made: Captured) -> bool:
    """Whether all that training writes to is the module's, where `_for_another` finds it."""
    own = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    tensors = made.description.tensors
    return all(t.name in own for t in tensors if t.kind is not TensorKind.CONSTANT)


def _for_another(known: _Known, module: nn.Module) -> Captured:
    """The same with the tensors of an equal module."""
    pairs = zip(_tensors(known.module), _tensors(module), strict=True)
    instead: dict[int, object] = {id(theirs): own for theirs, own in pairs}
    captured = copy.copy(known.captured)
    captured._table = copy.deepcopy(captured._table, instead)
    return captured


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
