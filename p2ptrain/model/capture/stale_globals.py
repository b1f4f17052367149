"""What model and loss read in Python that has changed since they were captured.

Devices compute with what was read then. A data set or a callback that changes a global later (an
attribute, an entry of a dict) changes plain torch's curve and not theirs, without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from p2ptrain.model.tracing.python_state import REGISTERS, PythonState, current

_COMPARED_BYTES = 2**20
"""Larger tensors are data: their values are not watched."""

_SWITCH = "training"
"""Of a module, which train() and eval() write: a callback may call them."""


class Outdated:
    """Of one captured model; to be made before anything of the user's runs again."""

    def __init__(self, module: nn.Module, loss: object) -> None:
        self._held = PythonState({"": module, "loss": loss}, code=True)
        registered = {
            id(tensor)
            for _, part in self._held.modules()
            for register in REGISTERS
            for tensor in part.__dict__[register].values()
        }
        self._values = [
            (path, holder, key, value.detach().clone())
            for path, holder, key, value in self._held.values()
            if isinstance(value, Tensor)
            and id(value) not in registered
            and value.nbytes <= _COMPARED_BYTES
        ]
        self._reported = set[str]()

    def news(self) -> list[str]:
        """Names of what has changed and was not named before."""
        changed = [path for path in self._held.changed() if path.split(".")[-1] != _SWITCH]
        changed += [
            path
            for path, holder, key, value in self._values
            if not _equal(current(holder, key), value)
        ]
        new = [path for path in dict.fromkeys(changed) if path not in self._reported]
        self._reported.update(new)
        return new


def _equal(now: Any, before: Tensor) -> bool:
    return (
        isinstance(now, Tensor)
        and now.shape == before.shape
        and now.dtype == before.dtype
        and bool(torch.isclose(now.detach(), before, rtol=0, atol=0, equal_nan=True).all())
    )
