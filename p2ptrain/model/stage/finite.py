"""Whether a stage's next update is finite, known before the update is committed.

Almost always by arithmetic on four numbers: how large the weights, the optimizer's state and the
gradients can be at most. Only the gradients' norm is computed in every update. Where these bounds
come near the largest number of the weights' type, everything is looked at, and where that does not
decide, the update is tried on copies, one parameter after the other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from p2ptrain.model.stage import update_bounds
from p2ptrain.model.stage.optimizer import StageOptimizer
from p2ptrain.model.stage.optimizer_form import AS_GIVEN, PlainColumns
from p2ptrain.model.stage.update_bounds import Bounds, ParameterSizes

_ROOM = 16.0
"""Between a bound and the largest number of a type: more than all rounding makes of it."""

_OF_AVERAGES: Mapping[str, frozenset[str]] = defaultdict(
    lambda: frozenset({"betas"}), {"ASGD": frozenset({"lr"})}
)
"""Numbers that bounds take to have always been the same."""

_SMALL_ELEMENTS = 16384

_MIN = 1e-30
"""Added to sums of squares: what they lose of the smallest values is less."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A tensor that is not finite.

    Attributes:
        what: "gradient", "weight", "optimizer state" or "buffer".
        name: of the parameter or buffer.
    """

    what: str
    name: str


class FiniteUpdates:
    """Looks after one stage's updates, in the compute thread.

    Args:
        optimizer: the stage's.
        buffers: floating-point tensors besides parameters that training writes to. One that is not
            finite at first is the model's own way, and is not looked at.
    """

    def __init__(self, optimizer: StageOptimizer, buffers: Mapping[str, Tensor]) -> None:
        self._optimizer = optimizer
        self._buffers = {
            name: tensor.detach()
            for name, tensor in buffers.items()
            if _counts(tensor) and _is_finite(tensor)
        }
        self._flat_buffers = [tensor.view(-1) for tensor in self._buffers.values() if _lies(tensor)]
        if len(self._flat_buffers) < len(self._buffers):
            self._flat_buffers = []  # each is looked at as it lies
        dtypes = {p.dtype for p in optimizer.parameters.values() if _counts(p)}
        largest = min((torch.finfo(dtype).max for dtype in dtypes), default=math.inf)
        self._limit = largest / _ROOM
        self._bounds: Bounds | None = None
        elements = max((p.numel() for p in optimizer.parameters.values()), default=0)
        tiny = max((torch.finfo(dtype).tiny for dtype in dtypes), default=0.0)
        eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        self._sizes = ParameterSizes(elements, tiny, eps)

    def gradient_norm(self, gradients: Mapping[str, Tensor | None]) -> float | Broken:
        """An upper bound of all their values; or the first that is not finite, from the last."""
        named = _looked_at(gradients)
        norm = _norm(list(named.values()))
        if math.isfinite(norm):
            return norm
        for name, gradient in reversed(named.items()):
            if not _is_finite(gradient):
                return Broken("gradient", name)
        return _largest(named.values())  # the sum of their squares is too large, no more

    def norms(self, gradients: Mapping[str, Tensor | None]) -> list[Tensor | None]:
        """Of all their values, and of all buffers: on an accelerator, and not waited for."""
        looked_at = (_looked_at(gradients), self._buffers)
        return [_norm_inside(list(named.values())) if named else None for named in looked_at]

    def broken_buffer(self, instead: Mapping[str, Tensor] | None = None) -> Broken | None:
        """The first buffer that is not finite.

        Args:
            instead: of the buffers as they are now.
        """
        looked_at, flat = self._buffers, self._flat_buffers
        if instead:
            looked_at = {name: instead.get(name, tensor) for name, tensor in looked_at.items()}
            flat = []
        if math.isfinite(_norm(flat or list(looked_at.values()))):
            return None
        broken = (name for name, tensor in looked_at.items() if not _is_finite(tensor))
        return next((Broken("buffer", name) for name in broken), None)

    def is_safe(self, gradient: float, changes: PlainColumns = AS_GIVEN) -> bool:
        """Whether an update with gradients of at most that size stays finite, as far as is known.

        Where it does, it is taken to be made.

        Args:
            changes: numbers that a schedule gives for it.
        """
        if self._bounds is None:
            return False
        before = after = self._bounds
        steady = not changes.keys() & _OF_AVERAGES[self._optimizer.name]
        for numbers in self._optimizer.numbers(changes):
            of_group, largest = update_bounds.after(
                self._optimizer.name, numbers, before, gradient, self._sizes, steady=steady
            )
            if not largest < self._limit:
                return False
            after = after.most(of_group)
        self._bounds = after
        return True

    def look(self) -> Broken | None:
        """Look at all weights and all of the optimizer's state: the bounds are exact again."""
        first = second = 0.0
        for name, tensor in self._optimizer.own_state().items():  # averages are no larger
            if not tensor.dim() or not _counts(tensor):
                continue
            size = _largest([tensor])
            if not math.isfinite(size):
                return Broken("optimizer state", name.rpartition(".")[0])
            if update_bounds.is_square(name):
                second = max(second, size)
            else:
                first = max(first, size)
        weight = 0.0
        for name, parameter in self._optimizer.parameters.items():
            size = _largest([parameter.detach()]) if _counts(parameter) else 0.0
            if not math.isfinite(size):
                return Broken("weight", name)
            weight = max(weight, size)
        self._bounds = Bounds(weight, first, second)
        return None

    def tried(self, changes: PlainColumns = AS_GIVEN, scale: float = 1.0) -> Broken | None:
        """The first parameter that the update, tried on copies, would leave not finite.

        Args:
            changes: numbers that a schedule gives for it.
            scale: what clipping multiplies the gradients with at most.
        """
        self._bounds = None  # to be looked at again
        for name in self._optimizer.parameters:
            weight, state = self._optimizer.tried(name, changes, scale)
            if _counts(weight) and not _is_finite(weight):
                return Broken("weight", name)
            if not all(_is_finite(tensor) for tensor in state if _counts(tensor)):
                return Broken("optimizer state", name)
        return None


def _looked_at(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {
        name: g if g.layout is torch.strided else g.coalesce().values()
        for name, g in gradients.items()
        if g is not None and _counts(g)
    }


def _counts(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _lies(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous()


def _norm(tensors: Sequence[Tensor]) -> float:
    """Of all values together; not finite where one is not, or where squares are too large.

    Small tensors are put together first: each call of torch costs more than looking at them.
    """
    if tensors and tensors[0].device.type != "cpu":  # each number asked for is waited for
        return float(_norm_inside(tensors))
    small: dict[torch.dtype, list[Tensor]] = {}
    parts: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel() < _SMALL_ELEMENTS:
            small.setdefault(tensor.dtype, []).append(tensor)
        else:
            parts.append(tensor)
    parts += [_in_one(several) for several in small.values()]
    return math.hypot(*(_one_norm(part) for part in parts))


def _norm_inside(tensors: Sequence[Tensor]) -> Tensor:
    norms = torch._foreach_norm([tensor.detach() for tensor in tensors])
    norm: Tensor = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]))
    return norm


def _in_one(tensors: Sequence[Tensor]) -> Tensor:
    if all(tensor.dim() == 1 for tensor in tensors):
        return torch.cat(list(tensors))
    flat: Tensor = torch._utils._flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def _one_norm(tensor: Tensor) -> float:
    """As a product with itself where it lies in one piece: several times as fast as torch's norm.

    Squares that underflow are those of values that change no bound.
    """
    if tensor.is_floating_point() and tensor.is_contiguous():
        flat = tensor.view(-1)
        return math.sqrt(float(torch.dot(flat, flat)) + _MIN)
    return float(torch.linalg.vector_norm(tensor))


def _largest(tensors: Iterable[Tensor]) -> float:
    """The largest magnitude; NaN where one is."""
    sizes = [tensor.abs().max().item() for tensor in tensors if tensor.numel()]
    return math.nan if any(math.isnan(size) for size in sizes) else max(sizes, default=0.0)


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
