"""Operators that a trace must not look into.

What they do inside depends on values, or differs for large batches, so a trace of their insides
would be refused or fit one batch size. Each is traced as an operator of ours, which has a rule for
its result's shape and nothing else; in the graph it is ATen's again, and devices run that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from p2ptrain.model.packed import PackedCalls
from p2ptrain.model.stand_in import NAMESPACE, stand_in

_broadcast_shapes: Any = torch.broadcast_shapes


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


_INSTEAD: dict[object, Callable[..., Any]] = {
    torch.cdist: _call_cdist,
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
    by seeds of their own (`randomness`).
    """
    if name is not None and name.startswith(f"{NAMESPACE}."):
        return "aten." + name.removeprefix(f"{NAMESPACE}.")
    return name if name is None else _GENERATOR.sub(_without_generator, name)


_GENERATOR = re.compile(r"\.(?:(\w+)_)?generator$")


def _without_generator(overload: re.Match[str]) -> str:
    return "." + (overload[1] or "default")
