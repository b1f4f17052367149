"""Embeddings whose backward adds only the rows that a micro-batch has read.

Autograd makes a gradient as large as the table for every micro-batch, nearly all of it zeros, and
adds it to the one before. A vocabulary of 30,000 words 512 wide is 62 MB: more than the C library
keeps for the next time, so the kernel finds and clears 15,000 pages for each of them. Here the rows
of the words that were read are computed by themselves and added to their places in `.grad`:

    dense   .grad (words, wide) += zeros with the rows added, in the order of the samples
    here    rows (words read, wide) = the same additions;  .grad[words read] += rows

That gives the same bits, since no sum of gradients that begins at +0 is ever -0, and all else adds
a zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EMBEDDING = "aten.embedding.default"


def embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """ATen's embedding, for a leaf `weight` that nothing else reads between two updates.

    The backward adds to `weight.grad` by itself, so hooks on the leaf are not called.

    Args:
        weight: (words, wide); takes gradients.
        indices: (...), int32 or int64.

    Returns:
        (..., wide).
    """
    if sparse or not torch.is_grad_enabled() or indices.numel() >= weight.size(0):
        arguments = (weight, indices, padding_idx, scale_grad_by_freq, sparse)
        whole: Tensor = torch.ops.aten.embedding.default(*arguments)
        return whole
    result: Tensor = _Embedding.apply(weight, indices, padding_idx, scale_grad_by_freq)  # type: ignore[no-untyped-call]
    return result


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, indices: Tensor, padding_idx: int, by_frequency: bool
    ) -> Any:
        ctx.save_for_backward(indices)
        ctx.weight, ctx.padding_idx, ctx.by_frequency = weight, padding_idx, by_frequency
        return torch.ops.aten.embedding.default(weight, indices, padding_idx, by_frequency)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        (indices,) = ctx.saved_tensors
        weight: Tensor = ctx.weight
        read, places = torch.unique(indices, return_inverse=True)
        rows = torch.ops.aten.embedding_dense_backward(
            gradients[0], places, len(read), _place(read, ctx.padding_idx), ctx.by_frequency
        )
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, read, rows)
        return None, None, None, None


def _place(read: Tensor, word: int) -> int:
    """Where `word` stands in the ascending `read`; -1 = it is not there."""
    place = int(torch.searchsorted(read, word))
    return place if word >= 0 and place < len(read) and int(read[place]) == word else -1
