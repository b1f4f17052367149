"""The operator by which a model's own backward takes the place of autograd's.

What a `torch.autograd.Function` computes are nodes without gradients, and what its backward
computes is a graph; this joins the two. See `traced_functions` for how they are found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

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
