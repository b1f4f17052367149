"""Whether a model treats each sample by itself, found by trying.

A graph shows batch normalisation and dropout (`division_effects`), but not that some sum or product
runs over the samples: a batch mean taken by hand, contrastive losses, losses that are sums. So a
few samples go through the model together and in parts, unit by unit, and must give the same. Where
a model has backwards of its own, so must their gradients (`backward_probe`).

Dropout's masks and BatchNorm's statistics would differ whatever else the model does, and hide it.
So what all samples together draw and measure is noted, and each part gets its part of it.

A loss may have a small part that looks across samples, as the term that balances a mixture of
experts: a hundredth of the loss, less than the rounding errors of a deep model. So the loss is
compared on the same values for the whole and its parts, and in double precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from p2ptrain.model.graph.description import ModelDescription, TensorKind
from p2ptrain.model.graph.nodes import Argument, GraphNode, InputRef, TargetRef
from p2ptrain.model.graph.values import ValueDescription, sample_dimension
from p2ptrain.model.sample_independence.backward_probe import (
    close,
    gradients_agree,
    has_own_backward,
)
from p2ptrain.model.sample_independence.division_effects import indivisible_boundaries, mask_values
from p2ptrain.model.stage.mutated_state import written_names
from p2ptrain.model.stage.program import Program
from p2ptrain.model.stage.stage import NO_SEED

SAMPLES = 4
"""Taken together, and in halves."""

HalfWeights: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[float, float]]
"""(inputs, targets) of some samples -> which part of what they count each half of them has."""


def alike(inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[float, float]:
    """`HalfWeights` of a mean over the samples."""
    return _HALVES


_HALVES = (0.5, 0.5)


MAX_TRIED = 8
"""Values tried in each leaf of the batch."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """A unit whose results depend on which samples are computed together.

    Attributes:
        is_sum: that is all: its loss is the sum of what parts of the samples give.
        is_told: it shows with a value alone that `first_mixing_unit` is to try.
    """

    unit: int
    is_sum: bool = False
    is_told: bool = False


def first_mixing_unit(
    description: ModelDescription,
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    weights: HalfWeights = alike,
    telling: Mapping[InputRef | TargetRef, Sequence[float]] | None = None,
) -> Mixing | None:
    """The first unit whose results, or whose loss, depend on which samples are computed together.

    Units between which something passes that cannot be cut between samples are tried as one. The
    samples are tried as they are, and with values in the first one that a mask may be made of:
    0 and 1 in each leaf of the targets, and what the graph compares a leaf with.

    Args:
        state: tensors by canonical name; buffers are copied before anything runs.
        inputs: of `SAMPLES` samples, as `crossing` lists them for boundary 0.
        targets: all leaves.
        weights: of the losses of halves.
        telling: more values to be tried in leaves of the batch, after all others.

    Returns:
        None where there is none.
    """
    probe = _DivisionProbe(description, with_own_buffers(description, state), weights)
    found = probe.run(inputs, targets)
    if found is not None:
        return found
    own = mask_values(description)
    for is_told, values in ((False, own), (True, telling or {})):
        found = _first_with_values(description, probe, inputs, targets, values, is_told=is_told)
        if found is not None:
            return Mixing(found.unit, is_told=is_told)
    return None


def _first_with_values(
    description: ModelDescription,
    probe: _DivisionProbe,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    values: Mapping[InputRef | TargetRef, Sequence[float]],
    *,
    is_told: bool,
) -> Mixing | None:
    """With each of these values in the first sample; of targets with 0 and 1 too, unless told."""
    always = () if is_told else (0, 1)
    for index, value in enumerate(description.targets):
        for number in dict.fromkeys([*always, *values.get(TargetRef(index), ())][:MAX_TRIED]):
            with suppress(RuntimeError, IndexError):  # no such class, for one: it shows nothing
                found = probe.run_loss(_with_first(targets, index, value, number))
                if found is not None:
                    return found
    for place, leaf in enumerate(description.crossing_values(0, "train")):
        described = description.describe(leaf, "train")
        for number in values.get(InputRef(leaf.index), [])[:MAX_TRIED]:
            with suppress(RuntimeError, IndexError):
                found = probe.run(_with_first(inputs, place, described, number), targets)
                if found is not None:
                    return found
    return None


class _DivisionProbe:
    """Runs samples together and in halves; finds the first unit that mixes them, or None."""

    def __init__(
        self, description: ModelDescription, state: Mapping[str, Tensor], weights: HalfWeights
    ) -> None:
        self._weights = weights
        self._description = description
        self._doubled = computing_in_double(description)
        self._state = state
        borders = [*range(len(description.units)), len(description.units)]
        fixed = set(indivisible_boundaries(description)) - {0}
        borders = [border for border in borders if border not in fixed]
        self._parts = [*pairwise(borders)]
        # What comes before is the same whatever the targets are.
        self._loss = next(
            (k for k, part in enumerate(self._parts) if description.target_uses(*part, "train")),
            len(self._parts) - 1,
        )
        self._entering_loss: list[Tensor] = []
        self._inputs: Sequence[Tensor] = ()

    def run(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Mixing | None:
        """All units."""
        self._inputs = inputs
        mixing, entering_loss = self._run(self._description, range(self._loss), [*inputs])
        if mixing is not None:
            return mixing
        if not self._entering_loss:
            self._entering_loss = entering_loss
        return self._run_loss(entering_loss, targets)

    def run_loss(self, targets: Sequence[Tensor]) -> Mixing | None:
        """Those that see targets, after `run`, with what its first batch has given them."""
        return self._run_loss(self._entering_loss, targets)

    def _run_loss(self, entering: list[Tensor], targets: Sequence[Tensor]) -> Mixing | None:
        units = range(self._loss, len(self._parts))
        try:
            return self._run(self._doubled, units, [*map(in_double, entering)], targets)[0]
        except RuntimeError:  # some operators have no double precision
            return self._run(self._description, units, entering, targets)[0]

    def _run(
        self,
        described: ModelDescription,
        parts: range,
        values: list[Tensor],
        targets: Sequence[Tensor] = (),
    ) -> tuple[Mixing | None, list[Tensor]]:
        """The first of these parts that mixes samples, or None with what comes out of the last.

        Rounding may look like it, as where a BatchNorm divides by the spread of values that are
        almost alike: what is found so must show in double precision too.
        """
        for part in parts:
            mixing, leaving = self._run_part(described, part, values, targets)
            if mixing is not None and described is not self._doubled:
                with suppress(RuntimeError):
                    doubled = [*map(in_double, values)]
                    mixing, _ = self._run_part(self._doubled, part, doubled, targets)
            if mixing is not None:
                return mixing, leaving
            values = leaving
        return None, values

    def _run_part(
        self,
        described: ModelDescription,
        part: int,
        whole: list[Tensor],
        given: Sequence[Tensor],
    ) -> tuple[Mixing | None, list[Tensor]]:
        """Whether it mixes samples, and what it makes of all of them."""
        first, end = self._parts[part]
        state = {name: self._state[name] for name in described.state_names(first, end)}
        targets = [*given] if described.target_uses(first, end, "train") else []
        if described is self._doubled:
            state = {name: in_double(tensor) for name, tensor in state.items()}
            targets = [*map(in_double, targets)]
        seen = [targets, *_halves(described.targets, targets)] if targets else [[], [], []]
        entering = [whole, *_halves(described.crossing(first, "train"), whole)]
        program = Program(described, first, end, "train", state)
        values = _run_alike(program, entering, seen)
        is_loss = end == len(described.units)
        weights = self._weights(self._inputs, given) if is_loss else _HALVES
        mixing = None
        if not _agree(program.outputs, values, weights):
            mixing = Mixing(first, is_loss and _adds_up(*(value[0] for value in values)))
        elif any(has_own_backward(described, unit) for unit in range(first, end)) and not (
            gradients_agree(described, (first, end), state, entering, seen, weights)
        ):
            mixing = Mixing(first)
        return mixing, values[0]


def _run_alike(
    program: Program, entering: Sequence[list[Tensor]], targets: Sequence[list[Tensor]]
) -> list[list[Tensor]]:
    """What all samples give, then each half, with the same random numbers and statistics."""
    results = []
    with torch.no_grad(), DrawnAlike() as alike:
        for part, (given, target) in enumerate(zip(entering, targets, strict=True)):
            if part:
                alike.half(part - 1)
            results.append(program.run(given, target, NO_SEED))
    return results


def _adds_up(whole: Tensor, first: Tensor, second: Tensor) -> bool:
    return bool(whole != 0) and close(whole, first + second)


def _with_first(
    leaves: Sequence[Tensor], index: int, described: ValueDescription, number: float
) -> list[Tensor]:
    """`leaves` with `number` everywhere in the first sample of one of them."""
    changed = list(leaves)
    changed[index] = leaves[index].clone()
    changed[index].narrow(sample_dimension(described) or 0, 0, 1).fill_(number)
    return changed


def with_own_buffers(
    description: ModelDescription, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """`state` with copies of its buffers, and of all that running the model writes to.

    Embeddings with a `max_norm` write to their weights, for one.
    """
    apart = written_names(description, 0, len(description.units)) | {
        tensor.name for tensor in description.tensors if tensor.kind is TensorKind.BUFFER
    }
    return {
        name: tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if name in apart
        else tensor
        for name, tensor in state.items()
    }


def _halves(described: Sequence[ValueDescription], whole: Sequence[Tensor]) -> list[list[Tensor]]:
    pairs = [
        tensor.tensor_split(2, sample_dimension(value) or 0)
        for value, tensor in zip(described, whole, strict=True)
    ]
    return [[pair[half] for pair in pairs] for half in (0, 1)]


def _agree(
    described: Sequence[ValueDescription],
    values: Sequence[Sequence[Tensor]],
    weights: tuple[float, float],
) -> bool:
    columns = zip(described, *values, strict=True)
    return all(_same(sample_dimension(value), weights, *tensors) for value, *tensors in columns)


def _same(
    dimension: int | None,
    weights: tuple[float, float],
    whole: Tensor,
    first: Tensor,
    second: Tensor,
) -> bool:
    if not whole.is_floating_point():
        return True
    if dimension is not None:
        return close(whole, torch.cat([first, second], dimension))
    halves = zip((first, second), weights, strict=True)
    parts = [half * weight for half, weight in halves if weight]  # the mean of nothing is NaN
    if not parts:
        return True
    joined = torch.stack(parts).sum(0)
    if whole.isfinite().all() and not joined.isfinite().all():
        return False  # a half leaves out all of its own
    return close(whole, joined)


_DOUBLE: Mapping[object, torch.dtype] = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def in_double(tensor: Tensor) -> Tensor:
    """What is no whole number, as one of double precision; a tensor that is that already itself."""
    return tensor.to(_DOUBLE.get(tensor.dtype, tensor.dtype))


def computing_in_double(description: ModelDescription) -> ModelDescription:
    """Its training graph where nothing is cast to less; what it says of values stays."""
    nodes = tuple(map(_doubled, description.train.nodes))
    return replace(description, train=replace(description.train, nodes=nodes))


def _doubled(node: GraphNode) -> GraphNode:
    named = tuple((name, _argument(argument)) for name, argument in node.kwargs)
    return replace(node, args=tuple(map(_argument, node.args)), kwargs=named)


def _argument(argument: Argument) -> Argument:
    if isinstance(argument, tuple):
        return tuple(map(_argument, argument))
    return _DOUBLE.get(argument, argument) if isinstance(argument, torch.dtype) else argument


_STATISTICS = 5
"""Position of the switch for batch statistics among the arguments of these operators."""

_NORMALISATIONS = frozenset(
    {
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten._native_batch_norm_legit.default,
    }
)


class DrawnAlike(TorchDispatchMode):
    """Notes what all samples draw; then, after `half(0)` or `half(1)`, gives that half its part."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted: list[Any] = []
        self._half: int | None = None
        self._next = 0

    def half(self, number: int) -> None:
        """The samples of that half follow."""
        self._half, self._next = number, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        measures = func in _NORMALISATIONS and args[_STATISTICS]
        if not measures and torch.Tag.nondeterministic_seeded not in func.tags:
            return result
        if self._half is None:
            self._noted.append(tree_map(_copy, result))
            return result
        if self._next >= len(self._noted):  # more than all samples draw: nothing is known
            return result
        noted = self._noted[self._next]
        self._next += 1
        if measures:
            return _normalised(result, noted, args)
        if isinstance(result, Tensor):
            return _part(result, noted, self._half)
        pairs = zip(result, noted, strict=True)
        return type(result)(_part(one, other, self._half) for one, other in pairs)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _part(result: Any, noted: Any, half: int) -> Any:
    """`result`, filled with that half of `noted`."""
    if not isinstance(result, Tensor):
        return result
    for dimension, (size, whole) in enumerate(zip(result.shape, noted.shape, strict=True)):
        if size < whole:
            noted = noted.narrow(dimension, 0 if half == 0 else whole - size, size)
    return result.copy_(noted) if noted.shape == result.shape else result


def _normalised(result: Sequence[Any], noted: Sequence[Any], args: Sequence[Any]) -> Any:
    """As with the statistics of all samples; of one that takes none across them its own."""
    (_, mean, scale), (x, weight, bias) = noted, args[:3]
    if mean.shape != result[1].shape:
        return tuple(result)
    shape = [1, -1] + [1] * (x.dim() - 2)
    normal = (x - mean.reshape(shape)) * scale.reshape(shape)
    if weight is not None:
        normal = normal * weight.reshape(shape)
    if bias is not None:
        normal = normal + bias.reshape(shape)
    return normal.to(x.dtype), mean, scale
