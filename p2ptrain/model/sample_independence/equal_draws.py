"""Random numbers and batch statistics of some samples, the same when they are computed in parts.

Whether a model looks across samples is found by computing some together and in halves. Dropout's
masks and BatchNorm's statistics would differ whatever else the model does, and hide it. So what all
samples together draw and measure is noted, and each half gets its part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_STATISTICS = 5
"""Position of the switch for batch statistics among the arguments of these operators."""

_NORMALISATIONS = frozenset(
    {
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten._native_batch_norm_legit.default,
    }
)


class DrawnAlike(TorchDispatchMode):
    """Notes what all samples draw; then, after `half(0)` or `half(1)`, gives that half its part."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted: list[Any] = []
        self._half: int | None = None
        self._next = 0

    def half(self, number: int) -> None:
        """The samples of that half follow."""
        self._half, self._next = number, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        measures = func in _NORMALISATIONS and args[_STATISTICS]
        if not measures and torch.Tag.nondeterministic_seeded not in func.tags:
            return result
        if self._half is None:
            self._noted.append(tree_map(_copy, result))
            return result
        if self._next >= len(self._noted):  # more than all samples draw: nothing is known
            return result
        noted = self._noted[self._next]
        self._next += 1
        if measures:
            return _normalised(result, noted, args)
        if isinstance(result, Tensor):
            return _part(result, noted, self._half)
        pairs = zip(result, noted, strict=True)
        return type(result)(_part(one, other, self._half) for one, other in pairs)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _part(result: Any, noted: Any, half: int) -> Any:
    """`result`, filled with that half of `noted`."""
    if not isinstance(result, Tensor):
        return result
    for dimension, (size, whole) in enumerate(zip(result.shape, noted.shape, strict=True)):
        if size < whole:
            noted = noted.narrow(dimension, 0 if half == 0 else whole - size, size)
    return result.copy_(noted) if noted.shape == result.shape else result


def _normalised(result: Sequence[Any], noted: Sequence[Any], args: Sequence[Any]) -> Any:
    """As with the statistics of all samples; of one that takes none across them its own."""
    (_, mean, scale), (x, weight, bias) = noted, args[:3]
    if mean.shape != result[1].shape:
        return tuple(result)
    shape = [1, -1] + [1] * (x.dim() - 2)
    normal = (x - mean.reshape(shape)) * scale.reshape(shape)
    if weight is not None:
        normal = normal * weight.reshape(shape)
    if bias is not None:
        normal = normal + bias.reshape(shape)
    return normal.to(x.dtype), mean, scale
