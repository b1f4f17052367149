"""Shapes of what most models are made of, computed here.

torch has rules of its own for all of them, many in Python: ten times slower, and the first of them
loads torch's compiler (a second, and 60 MiB). A result here is never smaller than what torch would
make; what torch would refuse for its shapes it refuses when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_META = torch.device("meta")

_aten: Any = torch.ops.aten

_broadcast_shapes: Any = torch.broadcast_shapes


class Unfit(Exception):
    """These arguments are torch's own rule's."""


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """With its strides, where it fills its memory."""
    if x.is_contiguous():
        return _empty(x.shape, dtype or x.dtype)
    return torch.empty_like(x, dtype=dtype or x.dtype)


def _kept_type(x: Tensor) -> torch.dtype:
    """Of statistics."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _each(x: Tensor, *others: Any, **__: Any) -> Tensor:
    if not x.is_floating_point() or any(isinstance(other, complex) for other in others):
        raise Unfit
    return _like(x)


def _pair(a: Any, b: Any, *_: Any, **__: Any) -> Tensor:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        raise Unfit
    dtype = a.dtype if a.dtype == b.dtype else torch.result_type(a, b)
    if not dtype.is_floating_point:
        raise Unfit
    if a.shape == b.shape:
        return _like(a, dtype)
    shape = _broadcast_shapes(a.shape, b.shape)
    if shape == a.shape:
        return _like(a, dtype)
    if shape == b.shape and sum(size > 1 for size in a.shape) < 2:  # which has no order
        return _like(b, dtype)
    if any(x.stride() != _empty(x.shape, x.dtype).stride() for x in (a, b)):
        raise Unfit  # the order of the result's dimensions in memory is for torch to say
    return _empty(shape, dtype)


def _along(x: Tensor, dim: int, *_: Any) -> Tensor:
    if not x.is_floating_point() or not -x.dim() <= dim < x.dim():
        raise Unfit
    return _like(x)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Tensor:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise Unfit
    shape = (a.shape[0], b.shape[1])
    if _broadcast_shapes(bias.shape, shape) != torch.Size(shape):
        raise Unfit
    return _empty(shape, a.dtype)


def _batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any
) -> Any:
    if x.dim() < 2 or not x.is_floating_point():
        raise Unfit
    kept = _kept_type(x)
    size = x.shape[1] if training else 0
    return _like(x), _empty((size,), kept), _empty((size,), kept)


def _layer_norm(x: Tensor, shape: Sequence[int], *_: Any) -> Any:
    rows = x.dim() - len(shape)
    if rows < 0 or tuple(x.shape[rows:]) != tuple(shape) or not x.is_floating_point():
        raise Unfit
    each = (*x.shape[:rows], *(1 for _ in shape))
    kept = _kept_type(x)
    return _like(x), _empty(each, kept), _empty(each, kept)


def _group_norm(
    x: Tensor, weight: Any, bias: Any, n: int, c: int, rest: int, groups: int, *_: Any
) -> Any:
    if n < 0 or groups < 1 or not x.is_floating_point():
        raise Unfit
    kept = _kept_type(x)
    return _like(x), _empty((n, groups), kept), _empty((n, groups), kept)


def _nll_loss(x: Tensor, target: Tensor, weight: Any, reduction: int, *_: Any) -> Any:
    if x.dim() not in (1, 2) or target.dim() > 1:
        raise Unfit
    shape = x.shape[:-1] if reduction == 0 else ()
    return _empty(shape, x.dtype), _empty((), x.dtype)


def _loss(x: Tensor, target: Tensor, reduction: int = 1, *_: Any) -> Tensor:
    each = _pair(x, target)
    return each if reduction == 0 else _empty((), each.dtype)


def _mean(x: Tensor, *_: Any, dtype: torch.dtype | None = None) -> Tensor:
    if not x.is_floating_point():
        raise Unfit
    return _empty((), dtype or x.dtype)


def _mean_of(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if not x.is_floating_point() or not dim or not all(-x.dim() <= d < x.dim() for d in dim):
        raise Unfit
    gone = {d % x.dim() for d in dim}
    left = [size for d, size in enumerate(x.shape) if d not in gone]
    kept = [1 if d in gone else size for d, size in enumerate(x.shape)]
    return _empty(kept if keepdim else left, dtype or x.dtype)


def _masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    shape = _broadcast_shapes(x.shape, mask.shape)
    return _like(x) if shape == x.shape else _empty(shape, x.dtype)


def _written(x: Tensor, other: Any, *_: Any, **__: Any) -> Tensor:
    if isinstance(other, Tensor) and _broadcast_shapes(x.shape, other.shape) != x.shape:
        raise Unfit
    return x


def _written_itself(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


_UNARY = """
    relu.default tanh.default gelu.default silu.default sigmoid.default exp.default log.default
    sqrt.default rsqrt.default neg.default abs.default sin.default cos.default erf.default
    hardtanh.default hardswish.default hardsigmoid.default elu.default leaky_relu.default
    softplus.default mish.default reciprocal.default square.default log1p.default expm1.default
    floor.default ceil.default round.default sign.default threshold.default hardshrink.default
"""

_UNARY_INPLACE = "relu_ tanh_ silu_ sigmoid_ hardtanh_ hardswish_ leaky_relu_ elu_ exp_ neg_ zero_"


def _found(names: str, rule: Callable[..., Any]) -> dict[Any, Callable[..., Any]]:
    found: dict[Any, Callable[..., Any]] = {}
    for name in names.split():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(_aten, packet, None), overload, None)
        if operator is not None:
            found[operator] = rule
    return found


COMMON: Mapping[Any, Callable[..., Any]] = {
    **_found(_UNARY, _each),
    **_found(" ".join(f"{name}.default" for name in _UNARY_INPLACE.split()), _written_itself),
    **_found("add.Tensor sub.Tensor mul.Tensor div.Tensor maximum.default minimum.default", _pair),
    **_found("add.Scalar sub.Scalar mul.Scalar div.Scalar", _each),
    **_found("_softmax.default _log_softmax.default _safe_softmax.default", _along),
    **_found("add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor add_.Scalar mul_.Scalar", _written),
    **_found("addmm.default", _addmm),
    **_found("native_batch_norm.default", _batch_norm),
    **_found("native_layer_norm.default", _layer_norm),
    **_found("native_group_norm.default", _group_norm),
    **_found("nll_loss_forward.default", _nll_loss),
    **_found("mse_loss.default huber_loss.default smooth_l1_loss.default", _loss),
    **_found("mean.default sum.default", _mean),
    **_found("mean.dim sum.dim_IntList", _mean_of),
    **_found("masked_fill.Scalar", _masked_fill),
}
"""By operator of ATen's; each raises `Unfit` where torch's own rule is asked."""
