"""Products of groups of rows with a matrix each, as mixtures of experts are computed.

ATen's operator takes where each group ends from a tensor's values. Those are looked at before it
runs, because a received model may hold any; how far the operator itself looks differs by version.
torch's rule for traces knows bfloat16 only, but processors compute other types as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_impls

GROUPED_MM = "aten._grouped_mm.default"
_operator: Any = getattr(torch.ops.aten, "_grouped_mm", None)


def grouped_mm(
    rows: Tensor,
    matrices: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """ATen's, for groups that are there.

    Args:
        rows: (rows, in); (groups, rows, in) without `offs`.
        matrices: (groups, in, out).
        offs: (groups,), int32; where each group's rows end.

    Raises:
        IndexError: `offs` is not ascending or leads beyond the rows.
    """
    if offs is not None and offs.numel():
        inside = int(offs.min()) >= 0 and int(offs.max()) <= _grouped_length(rows, matrices)
        if not inside or bool((offs.diff() < 0).any()):
            raise IndexError("the groups of a grouped product are not there")
    result: Tensor = _operator.default(rows, matrices, offs, bias, out_dtype)
    return result


def _grouped_length(rows: Tensor, matrices: Tensor) -> int:
    """How long the dimension is that the groups divide."""
    if rows.dim() == 2:
        return int(rows.shape[1] if matrices.dim() == 2 else rows.shape[0])
    return int(matrices.shape[-1])


def traced_shape(
    mode: Any,
    func: Any,
    rows: Tensor,
    matrices: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """(rows, in) and (groups, in, out) -> (rows, out), and the like; rows padded to 16 bytes."""
    dtype = out_dtype or rows.dtype
    leading: list[Any] = list(rows.shape[:-1])
    if rows.dim() == 2 and matrices.dim() == 2 and offs is not None:
        leading = [offs.shape[0], *leading]
    shape = [*leading, matrices.shape[-1]]
    step = 16 // dtype.itemsize
    wide = (shape[-1] + step - 1) // step * step
    strides = [shape[-2] * wide, wide, 1][-len(shape) :]
    return rows.new_empty_strided(shape, strides, dtype=dtype)


if _operator is not None:
    _register: Any = fake_impls.register_op_impl
    _register(_operator.default)(traced_shape)
