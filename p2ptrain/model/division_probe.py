"""Whether a model treats each sample by itself, found by trying.

A graph shows batch normalisation and dropout (`division`), but not that some sum or product runs
over the samples: a batch's mean taken by hand, contrastive losses, losses that are sums. So a few
samples go through the model together and in parts, unit by unit, and must give the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from p2ptrain.model.description import ModelDescription, TensorKind
from p2ptrain.model.division import sample_dimension
from p2ptrain.model.program import Program
from p2ptrain.model.stage import NO_SEED
from p2ptrain.model.values import ValueDescription

SAMPLES = 4
"""Taken together, and in halves."""


def first_mixing_unit(
    description: ModelDescription,
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> int | None:
    """The first unit whose results, or whose loss, depend on which samples are computed together.

    For models that draw no random numbers and have no values that cannot be cut between samples.

    Args:
        state: tensors by canonical name; buffers are copied before anything runs.
        inputs, targets: all leaves of `SAMPLES` samples.

    Returns:
        Its index; None where there is none.
    """
    private = _with_own_buffers(description, state)
    entering = description.crossing(0, "train")
    values = [list(inputs), *_halves(entering, inputs)]
    wanted = [list(targets), *_halves(description.targets, targets)]
    for unit in range(len(description.units)):
        program = Program(description, unit, unit + 1, "train", private)
        uses = description.target_uses(unit, unit + 1, "train")
        with torch.no_grad():
            values = [
                program.run(given, target if uses else (), NO_SEED)
                for given, target in zip(values, wanted, strict=True)
            ]
        if not _agree(program.outputs, *values):
            return unit
    return None


def _with_own_buffers(
    description: ModelDescription, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    kinds = {tensor.name: tensor.kind for tensor in description.tensors}
    return {
        name: tensor.clone() if kinds.get(name) is TensorKind.BUFFER else tensor
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
    whole: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
) -> bool:
    columns = zip(described, whole, first, second, strict=True)
    return all(_same(sample_dimension(value), *tensors) for value, *tensors in columns)


def _same(dimension: int | None, whole: Tensor, first: Tensor, second: Tensor) -> bool:
    """Up to rounding, which differs with the batch size; what is not finite shows nothing."""
    if not whole.is_floating_point():
        return True
    joined = (first + second) / 2 if dimension is None else torch.cat([first, second], dimension)
    scale = whole.abs().amax() if whole.numel() else torch.ones(())
    if not scale.isfinite() or not joined.isfinite().all():
        return True
    tolerance = torch.finfo(whole.dtype).eps ** 0.5
    return bool((whole - joined).abs().le(tolerance * scale).all())
