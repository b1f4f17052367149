"""A round of training repeated on one device, unit by unit, to find where values become infinite.

The plan does not matter: units are computed one after the other, forwards and backwards, with the
weights that the round began with. So what is found comes from the model or the data; where nothing
is found, a device has sent values that the model does not produce.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.values import sample_dimension
from p2ptrain.model.stage.failures import all_finite
from p2ptrain.model.stage.stage import Stage

Crossed: TypeAlias = Callable[[int, bool, int, Sequence[Tensor | None]], None]
"""(unit behind a border, whether it is a backward, micro-batch, what crosses that border)."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where values are first not finite.

    Attributes:
        unit: whose; None where the data is not finite itself.
        backward: in its backward.
        micro_batch: of the round, from 0.
        row: the sample of the micro-batch, from 0; None where it is not one sample's.
        parameter: whose gradient it is; None where it is another value.
        is_weight: it was not finite before the round.
    """

    unit: int | None
    backward: bool
    micro_batch: int
    row: int | None = None
    parameter: str | None = None
    is_weight: bool = False


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """A micro-batch as the loader gives it.

    Attributes:
        inputs, targets: all leaves, flattened.
        weight: its part of the mini-batch.
    """

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    weight: float


class Replay:
    """A round on one device. Runs in a thread where nothing else changes torch's settings.

    Args:
        state: of the whole model, by name; nothing of it is changed.
        seed: of the job.
        step: updates before the round.
        crossed: receives what crosses each border of units.
        hashes: as the stages of the round had it.
        scale: of the losses of the round.
    """

    def __init__(
        self,
        description: ModelDescription,
        state: Mapping[str, Tensor],
        seed: int,
        step: int,
        crossed: Crossed | None = None,
        *,
        hashes: bool = False,
        scale: float = 0.0,
    ) -> None:
        self._description = description
        self._state = state
        self._seed, self._step = seed, step
        self._crossed = crossed
        self._hashes, self._scale = hashes, scale
        private = {n: t if isinstance(t, nn.Parameter) else t.clone() for n, t in state.items()}
        self._units = [
            Stage(description, unit, unit + 1, private, copy=False, hashes=hashes)
            for unit in range(len(description.units))
        ]

    def find(self, number: int, batch: ReplayBatch) -> Origin | None:
        """Do micro-batch `number` again, after those before it; None = all of it is finite."""
        found = self._forward(number, batch) or self._backward(number)
        for unit in self._units:
            unit.forget_held()
        if found is None or found.is_weight or found.row is not None:
            return found
        row = self._row(number, batch, found)
        return Origin(found.unit, found.backward, number, row, found.parameter)

    def largest(self) -> float:
        """Magnitude of any weight, and of any gradient of the micro-batches done so far."""
        tensors = [value.detach() for value in self._state.values() if value.is_floating_point()]
        for unit in self._units:
            parameters = unit.parameters().values()
            tensors += [p.grad for p in parameters if p.grad is not None]
        return max((float(value.abs().max()) for value in tensors if value.numel()), default=0.0)

    def _forward(self, number: int, batch: ReplayBatch) -> Origin | None:
        description = self._description
        row = _broken_row([*batch.inputs, *batch.targets], len(batch.inputs[0]))
        values = list(batch.inputs)
        if row is not None or not all_finite(description.crossing(0, "train"), values):
            return Origin(None, False, number, row)
        for index, unit in enumerate(self._units):
            if self._crossed is not None:
                self._crossed(index, False, number, values)
            uses = description.target_uses(index, index + 1, "train")
            values = unit.forward(
                number,
                values,
                batch.targets if uses else (),
                weight=batch.weight if index == len(self._units) - 1 else None,
                scale=self._scale,
                seed=(self._seed, self._step, number),
            )
            if not all_finite(description.crossing(index + 1, "train"), values):
                return self._in_forward(number, index, values)
        return None

    def _in_forward(self, number: int, index: int, values: Sequence[Tensor]) -> Origin:
        for name in self._units[index].parameters():
            if not self._state[name].isfinite().all():
                return Origin(index, False, number, parameter=name, is_weight=True)
        return Origin(index, False, number, self._crossing_row(index + 1, values))

    def _backward(self, number: int) -> Origin | None:
        gradients: Sequence[Tensor | None] = ()
        for index in reversed(range(len(self._units))):
            unit = self._units[index]
            gradients = unit.backward(number, gradients)
            if not _finite([value for value in gradients if value is not None]):
                return Origin(index, True, number, self._crossing_row(index, gradients))
            for name, parameter in unit.parameters().items():
                if parameter.grad is not None and not _finite([parameter.grad]):
                    return Origin(index, True, number, parameter=name)
            if self._crossed is not None and index:
                self._crossed(index, True, number, gradients)
        return None

    def _crossing_row(self, border: int, values: Sequence[Tensor | None]) -> int | None:
        """The only sample in which what crosses is not finite."""
        rows: set[int] = set()
        described = self._description.crossing(border, "train")
        for value, tensor in zip(described, values, strict=True):
            if tensor is None or _finite([tensor]):
                continue
            dimension = sample_dimension(value)
            if dimension is None:
                return None
            rows |= set(_broken_rows(tensor.movedim(dimension, 0)))
        return min(rows) if len(rows) == 1 else None

    def _row(self, number: int, batch: ReplayBatch, found: Origin) -> int | None:
        """Each sample by itself: the first in which the same begins; none where all do."""
        samples = len(batch.inputs[0])
        broken = []
        for row in range(samples):
            round_of = (self._description, self._state, self._seed, self._step)
            alone = Replay(*round_of, hashes=self._hashes, scale=self._scale)
            one = ReplayBatch(
                [value[row : row + 1] for value in batch.inputs],
                [value[row : row + 1] for value in batch.targets],
                batch.weight / samples,
            )
            try:
                there = alone._forward(number, one) or alone._backward(number)
            except (RuntimeError, ValueError, IndexError):  # the model does not take one alone
                return None
            if there is not None and (there.unit, there.backward) == (found.unit, found.backward):
                broken.append(row)
        return broken[0] if 0 < len(broken) < samples or samples == 1 == len(broken) else None


def _broken_row(values: Sequence[Tensor], samples: int) -> int | None:
    for value in values:
        if value.dim() and len(value) == samples and not _finite([value]):
            return _broken_rows(value)[0]
    return None


def _broken_rows(value: Tensor) -> list[int]:
    whole = value.isfinite().reshape(len(value), -1).all(1)
    rows: list[int] = whole.logical_not().nonzero().flatten().tolist()
    return rows


def _finite(values: Sequence[Tensor]) -> bool:
    return all(
        bool(value.isfinite().all())
        for value in values
        if value.is_floating_point() or value.is_complex()
    )


def size_of(values: Sequence[Tensor | None]) -> float:
    """Norm of all floating-point values together: how devices say what has arrived."""
    floating = [value for value in values if value is not None and value.is_floating_point()]
    if not floating:
        return 0.0
    norms = torch._foreach_norm([value.detach() for value in floating])
    return float(torch.stack([norm.double() for norm in norms]).norm())
