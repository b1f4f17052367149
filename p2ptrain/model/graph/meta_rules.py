"""Sizes of results that torch itself cannot tell without values: the largest that they may have.

Tensors here have shapes and no memory (torch's device "meta"). Where a size depends on values it
takes its bound, as with `packed.full_lengths`; the numbers in tensors are `Unknown`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from p2ptrain.errors import ProtocolError
from p2ptrain.model.graph.checked_operators import MAX_BINS, refuse_no_heads
from p2ptrain.model.graph.custom_operators import GROUPED_MM, traced_shape
from p2ptrain.model.graph.packed_sequences import full_length, weight_count

_META = torch.device("meta")

_broadcast_shapes: Any = torch.broadcast_shapes

Charge: TypeAlias = Callable[[float], None]
"""Receives how much arithmetic an operator does whose parts are not computed."""


class Unknown:
    """A number that depends on values: not known until the model runs."""


UNKNOWN = Unknown()


def bound(*sizes: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of that shape; of the type of `like`, unless another is given."""
    return torch.empty(sizes, dtype=dtype or like.dtype, device=_META)


def _number(*_: Any, **__: Any) -> Unknown:
    return UNKNOWN


def _pack(work: Charge, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    steps = full_length(x.shape[1 if batch_first else 0])
    x = x.narrow(1 if batch_first else 0, 0, steps)
    return x.flatten(0, 1).clone(), bound(steps, like=lengths)


def _pad(
    work: Charge,
    data: Tensor,
    batch_sizes: Tensor,
    batch_first: bool,
    value: Any,
    length: int,
) -> tuple[Tensor, Tensor]:
    steps = max(batch_sizes.shape[0], 1)
    batch, length = -(-data.shape[0] // steps), length if length > 0 else steps
    shape = (batch, length) if batch_first else (length, batch)
    padded = data.new_empty((*shape, *data.shape[1:]))
    return _following(padded, data), bound(batch, like=batch_sizes)


def _recurrent(gates: int, states: int, packed: bool) -> Callable[..., tuple[Tensor, ...]]:
    """lstm, gru and the like: of a whole sequence, without a step of it."""

    def compute(work: Charge, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        hx, params = args[1:3] if packed else args[:2]
        biases, layers, _, _, both, *rest = args[3 if packed else 2 :]
        given = [*hx] if states == 2 else [hx]
        directions = 2 if both else 1
        if layers < 1 or len(params) != weight_count(hx, layers, biases, both):
            raise ValueError("a recurrent layer has other weights than it has layers")
        steps = x.shape[0] if packed or not (rest and rest[0]) else x.shape[1]
        rows = max(math.prod(x.shape[:-1]), steps)
        work(2.0 * rows * sum(p.numel() for p in params) + 1000.0 * steps * layers * directions)
        kept = bound(layers * directions, rows, 2 * gates, given[-1].shape[-1], like=x)
        out = x.new_empty((*x.shape[:-1], given[0].shape[-1] * directions))
        if x.is_floating_point():
            out = out + (kept * params[0].sum()).sum() * x.sum()
        return out, *map(torch.empty_like, given)

    return compute


def _attention(
    work: Charge,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **settings: Any,
) -> Tensor:
    """As processors compute it where they need not keep every weight."""
    refuse_no_heads(query, key)
    fits = query.dim() == key.dim() == value.dim() == 4 and query.dtype.is_floating_point
    fits = fits and query.shape[:2] == key.shape[:2] == value.shape[:2]
    fits = fits and query.shape[-1] == key.shape[-1] == value.shape[-1]
    masked = attn_mask is not None and attn_mask.requires_grad
    if not fits or dropout_p or masked:
        attention = torch.ops.aten.scaled_dot_product_attention.default
        result: Tensor = attention(query, key, value, attn_mask, dropout_p, is_causal, **settings)
        return result
    work(4.0 * query.numel() * key.shape[-2])
    weights = query[..., :1, :] @ key.transpose(-2, -1)  # has the shape, and what autograd keeps
    return ((weights @ value).expand(query.shape) + query).exp()


def _ctc_loss(
    work: Charge, log_probs: Tensor, targets: Tensor, *settings: Any, reduction: int = 1
) -> Tensor:
    """Scores (steps, samples, classes) or (steps, classes), and paths through each target."""
    samples = log_probs.shape[1] if log_probs.dim() == 3 else 1
    longest = targets.shape[-1] if targets.dim() else 1
    paths = (samples, log_probs.shape[0], 2 * longest + 1)
    kept = _following(bound(*paths, like=log_probs), log_probs).exp()
    work(10.0 * kept.numel())
    how = settings[3] if len(settings) > 3 else reduction
    return kept.sum((1, 2)) if how == 0 else kept.sum()


def _grouped_mm(
    work: Charge, rows: Tensor, matrices: Tensor, *settings: Any, **named: Any
) -> Tensor:
    result: Tensor = traced_shape(None, None, rows, matrices, *settings, **named)
    work(2.0 * result.numel() * rows.shape[-1])
    return _following(result, rows, matrices)


def _following(result: Tensor, *sources: Tensor) -> Tensor:
    """With a gradient where a source has one."""
    for source in sources:
        if source.requires_grad:
            result = result + source.sum()
    return result


def _one_hot(work: Charge, x: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes <= 0:
        raise ProtocolError("a model says how many classes one_hot has")
    return bound(*x.shape, num_classes, like=x, dtype=torch.int64)


NODES: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            "aten.item.default",
            "aten._local_scalar_dense.default",
            "aten.is_nonzero.default",
            "aten.equal.default",
        ),
        _number,
    ),
    "aten._pack_padded_sequence.default": _pack,
    "aten._pad_packed_sequence.default": _pad,
    **{
        f"aten.{name}.{kind}": _recurrent(gates, states, kind == "data")
        for name, gates, states in (
            ("lstm", 4, 2),
            ("gru", 3, 1),
            ("rnn_tanh", 1, 1),
            ("rnn_relu", 1, 1),
        )
        for kind in ("input", "data")
    },
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.one_hot.default": _one_hot,
    "aten.ctc_loss.Tensor": _ctc_loss,
    "aten.ctc_loss.IntList": _ctc_loss,
    GROUPED_MM: _grouped_mm,
}
"""By the name that a node gives its operator."""


def _nonzero(x: Tensor) -> Tensor:
    return bound(x.numel(), x.dim(), like=x, dtype=torch.int64)


def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    return bound(_broadcast_shapes(x.shape, mask.shape).numel(), like=x)


def _unique(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (
        bound(x.numel(), like=x),
        bound(*x.shape, like=x, dtype=torch.int64),
        bound(x.numel(), like=x, dtype=torch.int64),
    )


def _unique_dim(x: Tensor, dim: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[dim]
    count = bound(rows, like=x, dtype=torch.int64)
    return torch.empty_like(x), count, count.clone()


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    dtype = torch.int64 if weights is None else torch.float64
    return bound(minlength or MAX_BINS, like=x, dtype=dtype)


def _repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    if output_size is None:
        raise ProtocolError("repeat_interleave by a tensor needs its output_size")
    return bound(output_size or 0, like=repeats, dtype=torch.int64)


def _histogram(x: Tensor, bins: int = 100, *_: Any, **__: Any) -> Tensor:
    return bound(bins, like=x)


def _same(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


def _same_and_mask(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _one(*_: Any) -> int:
    return 1


def without_masks(x: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Positions instead of masks, as many as there may be."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            place = len(found)
            if tuple(index.shape) != tuple(x.shape[place : place + index.dim()]):
                raise IndexError("a mask has another shape than what it is for")
            found += [bound(index.numel(), like=index, dtype=torch.int64) for _ in index.shape]
        else:
            found.append(index)
    return found


_aten = torch.ops.aten

PARTS: Mapping[Any, Callable[..., Any]] = {
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten._unique2.default: _unique,
    _aten.unique_consecutive.default: _unique,
    _aten.unique_dim.default: _unique_dim,
    _aten.bincount.default: _bincount,
    _aten.repeat_interleave.Tensor: _repeat_interleave,
    _aten.histc.default: _histogram,
    _aten._local_scalar_dense.default: _one,
    _aten._sample_dirichlet.default: _same,
    _aten._standard_gamma.default: _same,
    _aten.poisson.default: _same,
    _aten.fake_quantize_per_tensor_affine_cachemask.default: _same_and_mask,
    _aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: _same_and_mask,
    _aten.fake_quantize_per_channel_affine_cachemask.default: _same_and_mask,
}
"""By operator of ATen's, wherever one is made of it."""

INDEXED = frozenset(
    {
        _aten.index.Tensor,
        _aten.index_put.default,
        _aten.index_put_.default,
    }
)
"""Those whose second argument may be masks."""
