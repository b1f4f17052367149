"""Random numbers that forward() seeds by itself: the same ones for every batch.

Devices draw others for every micro-batch, whatever seed a graph was traced with: so a model with
noise that never changes trained with noise that does, without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from p2ptrain.errors import CaptureError
from p2ptrain.model.replaced import replaced_in_this_thread


class _HeldGenerators(TorchFunctionMode):
    """Refuse to draw from generators that were not there before forward()."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        super().__init__()
        self._known = {id(generator) for generator in (*generators, torch.default_generator)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        generator = given.get("generator")
        if isinstance(generator, torch.Generator) and id(generator) not in self._known:
            _refuse()
        return func(*args, **given)


def _refuse(*_: Any) -> None:
    raise CaptureError(
        "forward() or the loss seeds random numbers (torch.manual_seed, a torch.Generator of its "
        "own), so that they are the same for every batch; devices would draw others. Draw them "
        "once in __init__, into a buffer: self.register_buffer(name, torch.randn(...))"
    )


@contextlib.contextmanager
def unseeded(held: Iterable[object]) -> Iterator[None]:
    """For one call of forward() and the loss.

    Args:
        held: what module and loss keep, generators among it.

    Raises:
        CaptureError: random numbers are seeded.
    """
    generators = [value for value in held if isinstance(value, torch.Generator)]
    with (
        _HeldGenerators(generators),
        replaced_in_this_thread(torch, "manual_seed", _refuse),
        replaced_in_this_thread(torch.random, "manual_seed", _refuse),
    ):
        yield
