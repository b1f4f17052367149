"""Values of a tensor that are compared later, in little memory.

A small tensor is kept whole. Of a large one the norm of each row is kept, and some values: what
differs in a few numbers shows in the norms of their rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

WHOLE_NUMBERS = 1 << 14

_SAMPLED_NUMBERS = 1 << 10

_ROUNDING = 2 / 3
"""Other kernels add up in another order: apart by no more than epsilon to this power, relative to
the largest number of a tensor. That is 2.4e-5 for float32."""


@dataclass(frozen=True, slots=True)
class KeptValues:
    """Of one tensor.

    Attributes:
        values: all of them or some, each `stride` numbers behind the one before.
        norms: of the rows; sums of whole numbers; None where all values are kept.
        largest: absolute value.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor
    stride: int
    norms: Tensor | None
    largest: float

    @classmethod
    def of(cls, tensor: Tensor) -> KeptValues:
        """Copy what is compared."""
        kept = tensor.detach()
        if kept.numel() <= WHOLE_NUMBERS:
            values, stride, norms = kept.reshape(-1).clone(), 1, None
        else:
            stride = kept.numel() // _SAMPLED_NUMBERS | 1  # not a whole number of rows
            values, norms = kept.reshape(-1)[::stride].clone(), _norms(kept)
        return cls(tuple(kept.shape), kept.dtype, values, stride, norms, _largest(kept))


def _norms(tensor: Tensor) -> Tensor:
    rows = tuple(range(1, tensor.dim()))
    if not tensor.is_floating_point() and not tensor.is_complex():
        return tensor.sum(rows) if rows else tensor.sum().reshape(1)
    norm = torch.linalg.vector_norm
    parts = [norm(part) for part in torch.split(tensor, WHOLE_NUMBERS)] if not rows else []
    norms: Tensor = norm(tensor, dim=rows) if rows else torch.stack(parts)
    return norms


def _largest(tensor: Tensor) -> float:
    """0.0 where some are not finite: those are equal or they are not."""
    if not tensor.numel() or tensor.dtype is torch.bool:
        return 0.0
    ends = tensor.abs() if tensor.is_complex() else torch.stack(torch.aminmax(tensor))
    largest = float(ends.abs().max())
    return largest if math.isfinite(largest) else 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """The first number of a tensor that differs.

    Attributes:
        is_rounding: all are apart by no more than rounding.
        is_gradient: of a parameter.
    """

    text: str
    is_rounding: bool
    is_gradient: bool = False


def difference(
    what: str,
    own: KeptValues,
    theirs: KeptValues,
    floor: float = 0.0,
    autocast: torch.dtype | None = None,
) -> Difference | None:
    """Of two tensors; None where what is kept of them is equal, to the bit.

    Args:
        what: they are, for the text.
        floor: what rounding is relative to where no number is as large.
        autocast: the type, if any, in which most of what leads to them has been computed.
    """
    if (own.shape, own.dtype) != (theirs.shape, theirs.dtype):
        shapes = f"{list(own.shape)} {own.dtype}, captured {list(theirs.shape)} {theirs.dtype}"
        return Difference(f"{what} is {shapes}", is_rounding=False)
    found = _first_unequal(what, own, theirs, max(own.largest, floor), autocast)
    if own.norms is None or theirs.norms is None or (found and not found.is_rounding):
        return found
    rows = _unequal(own.norms, theirs.norms)
    if not rows.any():
        return found
    row = int(rows.nonzero()[0])
    norms = f"{_number(own.norms[row])}, captured {_number(theirs.norms[row])}"
    scale = max(_largest(own.norms), floor)
    is_rounding = _are_near(own.norms, theirs.norms, scale, autocast)
    if found is not None and is_rounding:
        return found
    return Difference(f"{what} (the norm of its row {row}) is {norms}", is_rounding)


def _first_unequal(
    what: str, own: KeptValues, theirs: KeptValues, scale: float, autocast: torch.dtype | None
) -> Difference | None:
    unequal = _unequal(own.values, theirs.values)
    if not unequal.any():
        return None
    index = int(unequal.nonzero()[0])
    place = [int(k) for k in torch.unravel_index(torch.tensor(index * own.stride), own.shape)]
    at = f" (at {place})" if place else ""
    pair = f"{_number(own.values[index])}, captured {_number(theirs.values[index])}"
    is_rounding = _are_near(own.values, theirs.values, scale, autocast)
    return Difference(f"{what}{at} is {pair}", is_rounding)


def _unequal(one: Tensor, other: Tensor) -> Tensor:
    return ~torch.isclose(one, other, rtol=0, atol=0, equal_nan=True)


def _are_near(one: Tensor, other: Tensor, scale: float, autocast: torch.dtype | None) -> bool:
    if not one.is_floating_point() and not one.is_complex():
        return False
    apart, numbers = (one - other)[_unequal(one, other)].abs(), torch.finfo(one.dtype)
    least = numbers.tiny / numbers.eps  # what is below `tiny` some threads make zero of
    eps = max(numbers.eps, torch.finfo(autocast or one.dtype).eps)
    return bool((apart <= max(scale * eps**_ROUNDING, least)).all())


def _number(value: Tensor) -> str:
    return f"{value.item():.7g}" if value.is_floating_point() else str(value.item())
