"""What needs the gradients of several stages: clipping by their common norm, and sums.

torch.nn.utils.clip_grad_norm_ takes the 2-norm of each parameter's gradient, then the 2-norm of
those norms. So each stage sends one number a parameter, and the holder, which has all of them in
the order of the model's parameters, gets torch's coefficient bit for bit. Partial sums of squares
per stage would be fewer numbers, but rounded differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from p2ptrain.model.wire.tensor_codec import dtype_name, dtype_named

_EPSILON = 1e-6
"""torch's guard against a zero norm."""


def tensor_norms(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Each gradient's 2-norm by name, 0-dim, of the gradient's own (real) dtype.

    Parameters without a gradient are left out, as torch does.
    """
    with torch.no_grad():
        return {
            name: torch.linalg.vector_norm(gradient)
            for name, gradient in gradients.items()
            if gradient is not None
        }


def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, 0-dim, from their norms in the model's order."""
    if not norms:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack(_in_torchs_order(norms)))
    return total


def clip_coefficient(norms: Sequence[Tensor], max_norm: float) -> Tensor:
    """What to multiply every gradient by so that their common norm is at most `max_norm`.

    Args:
        norms: of all gradients there are, in the order of `model.parameters()`.
        max_norm: the Job's `clip_grad_norm`.

    Returns:
        0-dim, at most 1; NaN where a gradient is NaN, as torch has it.
    """
    return torch.clamp(float(max_norm) / (total_norm(norms) + _EPSILON), max=1.0)


def to_number(coefficient: Tensor) -> tuple[float, str]:
    """The same coefficient with the name of its dtype, for others; nothing is lost."""
    return coefficient.item(), dtype_name(coefficient.dtype)


def to_tensor(coefficient: float, dtype: str) -> Tensor:
    """The inverse of `to_number`. Raises ProtocolError for an unknown dtype."""
    return torch.tensor(coefficient, dtype=dtype_named(dtype))


def scale_(gradients: Iterable[Tensor | None], coefficient: Tensor) -> None:
    """Multiply each gradient in place by `coefficient`, also where that is 1, as torch does."""
    with torch.no_grad():
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(coefficient)


def _in_torchs_order(norms: Sequence[Tensor]) -> list[Tensor]:
    """torch groups gradients by dtype before it stacks their norms; the order it takes the groups
    in is that of a hash table, so it is asked rather than imitated."""
    if len({norm.dtype for norm in norms}) == 1:
        return list(norms)
    groups = _group_tensors_by_device_and_dtype([list(norms)], with_indices=True)
    return [norms[index] for _, indices in groups.values() for index in indices]


def merge(parts: Iterable[Tensor | None]) -> Tensor | None:
    """The sum of one tensor's gradients, in memory of its own.

    Args:
        parts: of each stage that uses the tensor, the last stage's first; None counts as nothing.
    """
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            total = part.clone() if total is None else total + part
    return total
