"""Whether gradients treat each sample by itself, where a model has backwards of its own.

Autograd's derivatives look across samples where the forward does. A backward that a user wrote may
do so by itself, as one that divides by the mean of what arrives, and no loss shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from p2ptrain.model.graph.custom_operators import OWN_BACKWARD
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.values import ValueDescription, sample_dimension
from p2ptrain.model.stage.program import Program
from p2ptrain.model.stage.stage import NO_SEED

_SCALES = (1.0, 2.0**20, 2.0**-20)
"""Of the gradients that arrive: one that clips by their norm shows with large ones only."""


def has_own_backward(description: ModelDescription, unit: int) -> bool:
    """Whether a user's backward is part of that unit."""
    nodes = description.train.nodes[slice(*description.units[unit].train)]
    return any(node.operator == OWN_BACKWARD for node in nodes)


def gradients_agree(
    description: ModelDescription,
    units: tuple[int, int],
    state: Mapping[str, Tensor],
    entering: Sequence[Sequence[Tensor]],
    targets: Sequence[Sequence[Tensor]],
    weights: tuple[float, float] = (0.5, 0.5),
) -> bool:
    """Whether the gradients of samples taken in halves are those of all of them together.

    Args:
        units: the first, and the one behind the last.
        state: their tensors by name.
        entering: what they are given: for all samples, for the first half, for the second.
        targets: the same, or nothing three times.
        weights: of the halves' losses.
    """
    leaves = {
        name: tensor.detach().requires_grad_(description.tensors_by_name[name].trainable)
        for name, tensor in state.items()
    }
    program = Program(description, *units, "train", leaves)
    described = [value for value in program.inputs if value.may_require_grad]
    dimensions = [sample_dimension(value) for value in described]
    for scale in _SCALES:
        arriving = _ProbeGradients(program.outputs, scale, weights)
        whole, first, second = (
            _gradients(program, leaves, given, target, arriving, part)
            for part, (given, target) in enumerate(zip(entering, targets, strict=True))
        )
        adding = [None] * (len(whole) - len(dimensions))
        agree = all(
            close(all_of_them, halves[0] + halves[1] if k is None else torch.cat(halves, k))
            for k, all_of_them, *halves in zip(
                [*dimensions, *adding], whole, first, second, strict=True
            )
        )
        if not agree:
            return False
    return True


def close(whole: Tensor, joined: Tensor) -> bool:
    """Up to rounding, which differs with the batch size; what is not finite shows nothing."""
    scale = whole.abs().amax() if whole.numel() else torch.ones(())
    if not scale.isfinite() or not joined.isfinite().all():
        return True
    tolerance = torch.finfo(whole.dtype).eps ** 0.5
    return bool((whole - joined).abs().le(tolerance * scale).all())


class _ProbeGradients:
    """Gradients for what comes out of a unit, different for each sample, about `scale` large."""

    def __init__(
        self, described: Sequence[ValueDescription], scale: float, weights: tuple[float, float]
    ) -> None:
        self._scale, self._weights = scale, weights
        self._dimensions = [sample_dimension(value) for value in described]
        self._whole: list[Tensor] = []

    def of(self, outputs: Sequence[Tensor], part: int) -> list[Tensor]:
        """Those of all samples (part 0, which comes first) or of one half."""
        if part == 0:
            generator = torch.Generator().manual_seed(0)
            self._whole = [
                torch.randn(o.shape, generator=generator, dtype=torch.float64)
                .mul_(self._scale)
                .to(o.dtype)
                for o in outputs
            ]
            return self._whole
        pairs = zip(self._dimensions, self._whole, strict=True)
        weight = self._weights[part - 1]
        return [g * weight if k is None else g.tensor_split(2, k)[part - 1] for k, g in pairs]


def _gradients(
    program: Program,
    leaves: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    arriving: _ProbeGradients,
    part: int,
) -> list[Tensor]:
    """Of the inputs that take gradients, then of the parameters."""
    received = [
        tensor.detach().requires_grad_(value.may_require_grad)
        for value, tensor in zip(program.inputs, inputs, strict=True)
    ]
    with torch.enable_grad():
        # an operator may write in place to what it is given: not to a leaf
        given = [leaf.view_as(leaf) if leaf.requires_grad else leaf for leaf in received]
        outputs = program.run(given, targets, NO_SEED)
    wanted = [tensor for tensor in (*received, *leaves.values()) if tensor.requires_grad]
    gradients = arriving.of(outputs, part)
    roots = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
    if not roots or not wanted:
        return [torch.zeros_like(tensor) for tensor in wanted]
    ends, given_back = zip(*roots, strict=True)
    found = torch.autograd.grad(ends, wanted, given_back, allow_unused=True)
    pairs = zip(wanted, found, strict=True)
    return [torch.zeros_like(tensor) if g is None else g for tensor, g in pairs]
