"""Operators that a trace must not look into.

What they do inside depends on values, or differs for large batches, so a trace of their insides
would be refused or fit one batch size. Each is traced as an operator of ours, which has a rule for
its result's shape and nothing else; in the graph it is ATen's again, and devices run that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from p2ptrain.model.graph.custom_operators import NAMESPACE, stand_in
from p2ptrain.model.graph.packed_sequences import PackedCalls

_broadcast_shapes: Any = torch.broadcast_shapes

_PARTS = 16
"""Most views of each sample that a batch is divided into."""


@stand_in("cdist(Tensor x1, Tensor x2, float p=2.0, int? compute_mode=None) -> Tensor")
def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    """(..., P, M) and (..., R, M) -> (..., P, R); torch computes otherwise where P or R > 25."""
    batch = _broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    return x1.new_empty((*batch, x1.shape[-2], x2.shape[-2]))


@stand_in("take_along_dim(Tensor self, Tensor indices, int? dim=None) -> Tensor")
def _take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """Shapes are broadcast but for `dim`, where the result is as long as `indices`."""
    if dim is None:
        return x.new_empty((indices.numel(),))
    dim %= x.dim()
    shape = list(_broadcast_shapes(_without(x, dim), _without(indices, dim)))
    return x.new_empty((*shape[:dim], indices.shape[dim], *shape[dim:]))


def _without(x: Tensor, dim: int) -> Sequence[int]:
    return (*x.shape[:dim], *x.shape[dim + 1 :])


_COMPUTE_MODES = {
    "use_mm_for_euclid_dist_if_necessary": None,
    "use_mm_for_euclid_dist": 1,
    "donot_use_mm_for_euclid_dist": 2,
}


def _call_cdist(
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str = "use_mm_for_euclid_dist_if_necessary",
) -> Any:
    return _cdist(x1, x2, float(p), _COMPUTE_MODES[compute_mode])


@stand_in("chunk(Tensor self, int chunks, int dim=0) -> Tensor[]")
def _chunk(x: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    """Equal parts along `dim`."""
    shape = list(x.shape)
    shape[dim] //= chunks
    return [x.new_empty(shape) for _ in range(chunks)]


def _call_chunk(x: Tensor, chunks: int, dim: int = 0) -> Any:
    """torch would fix the batch size where a batch of two views of each sample is divided."""
    parts = x.shape[dim] % chunks
    if isinstance(x.shape[dim], torch.SymInt) and statically_known_true(parts == 0):
        return tuple(_chunk(x, chunks, dim % x.dim()))
    return x.chunk(chunks, dim)


def _call_split(x: Tensor, split_size_or_sections: Any = None, dim: int = 0, **named: Any) -> Any:
    """The same, for parts as long as the batch."""
    part = named.get("split_size", split_size_or_sections)
    if isinstance(part, torch.SymInt):
        for parts in range(1, _PARTS + 1):
            if statically_known_true(part * parts == x.shape[dim]):
                return torch.split_with_sizes(x, [part] * parts, dim)
    return x.split(part, dim)  # type: ignore[no-untyped-call]


def _call_gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """torch's, which looks for variances below zero only to refuse them."""
    var = var * torch.ones_like(input) if isinstance(var, float) else var
    if var.size() != input.size() and input.size()[:-1] == var.size():
        var = var.unsqueeze(-1)
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss += 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


_INSTEAD: dict[object, Callable[..., Any]] = {
    torch.cdist: _call_cdist,
    torch.chunk: _call_chunk,
    Tensor.chunk: _call_chunk,
    torch.split: _call_split,
    Tensor.split: _call_split,
    functional.gaussian_nll_loss: _call_gaussian_nll_loss,
    torch.take_along_dim: _take_along_dim,
    Tensor.take_along_dim: _take_along_dim,
}


class StandIns(TorchFunctionMode):
    """Call ours where the model calls torch's."""

    def __init__(self) -> None:
        super().__init__()
        self._instead = {**_INSTEAD, **PackedCalls().instead}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._instead.get(func, func)(*args, **(kwargs or {}))


def aten_name(name: str | None) -> str | None:
    """The operator that devices run for a traced one.

    It is ATen's for one of ours, and for one that takes a generator the same without: devices draw
    by seeds of their own (`stage/random_operators.py`).
    """
    if name is not None and name.startswith(f"{NAMESPACE}."):
        return "aten." + name.removeprefix(f"{NAMESPACE}.")
    return name if name is None else _GENERATOR.sub(_without_generator, name)


_GENERATOR = re.compile(r"\.(?:(\w+)_)?generator$")


def _without_generator(overload: re.Match[str]) -> str:
    return "." + (overload[1] or "default")
