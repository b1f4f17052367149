"""Operators of our own, with which a traced graph expresses what ATen's operators do not.

own_backward    the backward of a `torch.autograd.Function` takes the place of autograd's: its nodes
                have no gradients, and the backward is a graph of its own
                (`tracing/autograd_functions.py` finds them)
grouped products of groups of rows with a matrix each, as mixtures of experts compute them. Where a
                group ends stands in a tensor, and a received model may hold any values: they are
                checked before ATen's operator runs. torch's trace rule knows bfloat16 only
fake quantise   rounding to few levels with a gradient, for quantisation-aware training. ATen
                computes it; torch only lacks the rule for the result's shape
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses import fake_impls

OWN_BACKWARD = "p2ptrain.own_backward"

ARGUMENTS = ("outputs", "inputs", "kept", "backward")

Backward: TypeAlias = Callable[[Sequence[Any]], Sequence[Tensor | None]]
"""Gradients that arrive for the outputs, then what was kept -> gradients for the inputs."""


def own_backward(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], kept: Sequence[Any], backward: Backward
) -> list[Tensor]:
    """`outputs`, computed without gradients; theirs for `inputs` are what `backward` says.

    Args:
        outputs: any shapes; what is returned lies in the same memory.
        inputs: what takes gradients; whatever requires none here gets none.
        kept: tensors and other values that `backward` needs.
    """
    if not torch.is_grad_enabled():
        return list(outputs)
    joined: tuple[Tensor, ...] = _Joined.apply(outputs, kept, backward, *inputs)  # type: ignore[no-untyped-call]
    return list(joined)


class _Joined(torch.autograd.Function):
    """Outputs and kept values are hidden in lists: autograd is to see no inputs in them."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Sequence[Tensor], kept: Sequence[Any], backward: Backward, *_: Tensor
    ) -> tuple[Tensor, ...]:
        are_tensors = [isinstance(value, Tensor) for value in kept]
        ctx.save_for_backward(*(v for v, tensor in zip(kept, are_tensors, strict=True) if tensor))
        ctx.others = [None if tensor else v for v, tensor in zip(kept, are_tensors, strict=True)]
        ctx.are_tensors, ctx.own = are_tensors, backward
        return tuple(output.detach() for output in outputs)  # for what arrived stays as it is

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        pairs = zip(ctx.are_tensors, ctx.others, strict=True)
        kept = [next(saved) if tensor else other for tensor, other in pairs]
        return (None, None, None, *ctx.own((*arriving, *kept)))


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


def _fake_quantize_traced(
    mode: Any, func: Any, self: Tensor, *settings: Any
) -> tuple[Tensor, Tensor]:
    """What was rounded, and where it has a gradient: both as `self`."""
    return torch.empty_like(self), torch.empty_like(self, dtype=torch.bool)


def know_shapes() -> None:
    """Let traces know what it gives."""
    register: Any = fake_impls.register_op_impl
    for name in (
        "fake_quantize_per_tensor_affine_cachemask",
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
        "fake_quantize_per_channel_affine_cachemask",
    ):
        register(getattr(torch.ops.aten, name).default)(_fake_quantize_traced)


NAMESPACE = "p2ptrain"

_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def stand_in(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make an operator with ATen's name and arguments.

    What is decorated says what its results look like, and is replaced by the operator.
    """
    _library.define(schema)
    name = schema.partition("(")[0]
    function, _, overload = name.partition(".")

    def register(shape_of: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(f"{NAMESPACE}::{name}", shape_of, lib=_library)
        made: Any = getattr(getattr(torch.ops, NAMESPACE), function)
        operator: Callable[..., Any] = getattr(made, overload or "default")
        return operator

    return register
