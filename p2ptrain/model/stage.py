"""A stage: some consecutive units with their weights, computing exactly what plain torch would.

Several things make the difference between "the same model" and the same bits; each was measured:

- What arrives is no autograd leaf but the result of a node of its own (`_Receive`), so a gradient
  that comes back for a value which is also passed on is summed in plain torch's order (the later
  stages' part first), and leaves with the strides it has.
- The backward of a micro-batch starts from all outputs at once, and parameters accumulate through
  autograd's own nodes.
- Tensors keep the strides that the user's have.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from p2ptrain.errors import InternalError
from p2ptrain.model.description import ModelDescription, TensorKind
from p2ptrain.model.diagnosis import NonFinite, find_non_finite
from p2ptrain.model.program import Program, Seed

NO_SEED: Seed = (0, 0, 0)


@dataclass(slots=True)
class _Held:
    """A micro-batch between its forward and its backward.

    Attributes:
        inputs, targets, seed: as given to `forward`.
        roots: what the backward starts from: the outputs, at the last stage the weighted loss.
        gradients: of the inputs, filled in by the backward.
    """

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    seed: Seed
    roots: list[Tensor]
    gradients: list[Tensor | None]


class Stage:
    """Units [first, end) of a model, with their own copy of the weights.

    Not thread-safe: all calls come from one thread, as torch's order of gradients requires.
    """

    def __init__(
        self,
        description: ModelDescription,
        first: int,
        end: int,
        state: Mapping[str, Tensor],
        *,
        copy: bool = True,
        separate: Collection[str] = (),
    ) -> None:
        """Build the stage.

        Args:
            description: of the whole model.
            first, end: its units.
            state: at least the tensors of `description.state_names(first, end)`, by name.
            copy: False computes with (and writes to) the tensors of `state` themselves.
            separate: parameters whose gradients are kept apart by micro-batch instead of summed,
                for `take_separate`: what `ties.merge` needs of a tensor shared between stages.
        """
        self.description = description
        self.first, self.end = first, end
        self._is_last = end == len(description.units)
        self._state = {
            name: _own(description, name, state, copy)
            for name in description.state_names(first, end)
        }
        self._train = Program(description, first, end, "train", self._state)
        self._evaluate: Program | None = None
        self._held: dict[int, _Held] = {}
        self._separate: dict[str, list[Tensor | None]] = {name: [] for name in separate}

    def forward(
        self,
        key: int,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        *,
        weight: float | None = None,
        seed: Seed = NO_SEED,
    ) -> list[Tensor]:
        """Run the training graph and keep what the backward needs under `key`.

        Args:
            key: number of the micro-batch.
            inputs: what crosses into the first unit, in the order of `description.crossing`.
            targets: all leaves of the loss's target, or none where no unit here uses any.
            weight: of this micro-batch's loss in the backward (last stage only; None is 1).
            seed: (job, step, micro-batch) for dropout and its like.

        Returns:
            What crosses out of the last unit, detached; at the last stage the unweighted loss.
        """
        if key in self._held:
            raise InternalError(f"micro-batch {key} was already forwarded")
        gradients: list[Tensor | None] = [None] * len(inputs)
        with torch.enable_grad():
            received = [
                _receive(value, gradients, position) if described.may_require_grad else value
                for position, (value, described) in enumerate(
                    zip(inputs, self._train.inputs, strict=True)
                )
            ]
            outputs = self._train.run(received, targets, seed)
            roots = list(outputs)
            if self._is_last and weight is not None:
                roots = [outputs[0] * weight]
        self._held[key] = _Held(inputs, targets, seed, roots, gradients)
        return [output.detach() for output in outputs]

    def backward(self, key: int, gradients: Sequence[Tensor | None] = ()) -> list[Tensor | None]:
        """Run the backward of micro-batch `key`; parameters add to their `.grad`.

        Args:
            key: of an earlier `forward`.
            gradients: one for each of its outputs, None where none came back; empty at the last
                stage.

        Returns:
            One for each of its inputs, None for those that need none.
        """
        held = self._held.pop(key)
        given: Sequence[Tensor | None] = gradients or [None] * len(held.roots)
        roots: list[Tensor] = []
        starts: list[Tensor | None] = []
        for root, gradient in zip(held.roots, given, strict=True):
            if root.requires_grad and (self._is_last or gradient is not None):
                roots.append(root)
                starts.append(gradient)
        held.roots.clear()
        if roots:
            torch.autograd.backward(roots, starts)
        for name, kept in self._separate.items():
            kept.append(self._state[name].grad)
            self._state[name].grad = None
        return held.gradients

    def evaluate(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], *, seed: Seed = NO_SEED
    ) -> list[Tensor]:
        """Run the evaluation graph without gradients; returns what crosses out of the last unit.

        At the last stage: the loss, then the tensors of the model's output.
        """
        if self._evaluate is None:
            self._evaluate = Program(self.description, self.first, self.end, "eval", self._state)
        with torch.no_grad():
            return self._evaluate.run(inputs, targets, seed)

    def first_non_finite(self, key: int) -> NonFinite | None:
        """Where a micro-batch between forward and backward first stopped being finite.

        Runs it again unit by unit; buffers keep their values.
        """
        held = self._held.get(key)
        if held is None:
            raise InternalError(f"micro-batch {key} is not held")
        units = range(self.first, self.end)
        return find_non_finite(
            self.description, units, self._state, held.inputs, held.targets, held.seed
        )

    def take_separate(self) -> dict[str, list[Tensor | None]]:
        """Gradients of the `separate` parameters since the last call, in order of the backwards.

        They are not in `.grad`: whoever takes them puts the sum there.
        """
        taken, self._separate = self._separate, {name: [] for name in self._separate}
        return taken

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by canonical name, in the model's order; frozen ones too."""
        return {n: t for n, t in self._state.items() if isinstance(t, nn.Parameter)}

    def state(self) -> dict[str, Tensor]:
        """Parameters, buffers and constants by canonical name: the tensors themselves."""
        return dict(self._state)

    def holds(self, key: int) -> bool:
        """Whether micro-batch `key` waits for its backward."""
        return key in self._held

    def held(self) -> int:
        """How many micro-batches wait for their backward."""
        return len(self._held)

    def forget_held(self) -> None:
        """Give up all micro-batches that wait for their backward."""
        self._held.clear()


class _Receive(torch.autograd.Function):
    """Identity on what arrived; its backward keeps the gradient instead of passing it on."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], position: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.position = gradients, position
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.gradients[ctx.position] = gradients[0]
        return None, None, None


def _receive(value: Tensor, gradients: list[Tensor | None], position: int) -> Tensor:
    leaf = value.detach().requires_grad_()
    result: Tensor = _Receive.apply(leaf, gradients, position)  # type: ignore[no-untyped-call]
    return result


def _own(
    description: ModelDescription, name: str, state: Mapping[str, Tensor], copy: bool
) -> Tensor:
    """The stage's tensor of that name, with the user's strides, in torch's own memory."""
    if name not in state:
        raise InternalError(f"tensor {name!r} of this stage is missing")
    described, given = description.tensors_by_name[name], state[name].detach()
    if tuple(given.shape) != described.shape or given.dtype is not described.dtype:
        raise InternalError(f"tensor {name!r} has shape {tuple(given.shape)} and {given.dtype}")
    tensor = given
    if copy or given.stride() != described.strides:
        tensor = torch.empty_strided(described.shape, described.strides, dtype=described.dtype)
        tensor.copy_(given)
    if described.kind is TensorKind.PARAMETER:
        return nn.Parameter(tensor, requires_grad=described.trainable)
    return tensor
