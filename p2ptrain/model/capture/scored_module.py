"""Module and loss as one callable, watched while traced."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from p2ptrain.errors import CaptureError
from p2ptrain.model.capture.export_errors import LossRefuses, refusal
from p2ptrain.model.capture.structure import Foreign, Structure, structure_of
from p2ptrain.model.tracing.attention_masks import CausalMasks
from p2ptrain.model.tracing.autograd_functions import Place, own_backwards_as_traced
from p2ptrain.model.tracing.derivatives import derivatives_as_traced
from p2ptrain.model.tracing.function_modes import calls_as_traced
from p2ptrain.model.tracing.python_state import PythonState
from p2ptrain.model.tracing.untraced_changes import HeldTensors, ReassignedBuffers
from p2ptrain.model.tracing.value_decisions import ValueDecisions
from p2ptrain.model.tracing.vmap_autocast import reported_as_eager

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class VaryingSize:
    """A length that differs from batch to batch, and is the same wherever it stands in one.

    Attributes:
        places: (leaf, dimension), leaves counted over inputs and then targets.
        name: of the first of them, for messages.
        seen: some lengths.
    """

    places: tuple[tuple[int, int], ...]
    name: str
    seen: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """A batch, taken apart.

    Attributes:
        input, target: how the two are built.
        input_leaves, target_leaves: tensors with the batch in dimension 0.
        varying: sizes that differ from batch to batch.
    """

    input: Structure
    target: Structure
    input_leaves: list[Tensor]
    target_leaves: list[Tensor]
    varying: tuple[VaryingSize, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of `varying`, in this batch."""
        leaves = [*self.input_leaves, *self.target_leaves]
        return tuple(leaves[v.places[0][0]].shape[v.places[0][1]] for v in self.varying)

    def dynamic(self, leaf: int) -> dict[int, int]:
        """Dimensions of a leaf, counted over inputs and targets, that vary -> which length."""
        return {
            dimension: number
            for number, size in enumerate(self.varying)
            for one, dimension in size.places
            if one == leaf
        }


class ScoredModule(nn.Module):
    """The user's module, then the user's loss, over flat leaves.

    Attributes:
        as_eager: whether libraries that ask whether they are exported get "no".
        differentiates: whether forward() or the loss is known to take derivatives.
        undefined: outputs of functions with their own backward for which no gradient arrives.
        copied: paths of buffers that the model computes with a copy of: it replaces them, and its
            backward needs what was there before.
        is_scored: whether the loss is computed in evaluation mode too; a zero stands for it if not.
        autocast: the type under which both are called, as `torch.autocast` has it; None: neither.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        example: Example,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.autocast = autocast
        self.module = module
        self.loss = loss
        self.as_eager = True
        self.differentiates = False
        self.undefined = frozenset[Place]()
        self.copied = frozenset[str]()
        self.is_scored = True
        self.masks = CausalMasks()
        self.decisions = ValueDecisions()
        self._roots = {"": module, "loss": loss}
        self.kept_tensors = HeldTensors(self, self.held())
        self.example = example
        self._record = _Record()

    def forward(self, inputs: list[Tensor], targets: list[Tensor]) -> tuple[Tensor, ...]:
        """The loss, and in evaluation mode the tensors of the model's output."""
        self.masks.begin()
        self.decisions.begin()
        buffers = ReassignedBuffers(self.held(), self.copied)
        with (
            calls_as_traced(self.decisions),
            reported_as_eager() if self.as_eager else contextlib.nullcontext(),
            derivatives_as_traced(expected=self.differentiates),
            own_backwards_as_traced(self.undefined, training=self.module.training) as calls,
        ):
            with casting(self.autocast):
                output = self.run(inputs)
                loss = self._loss_of(output, targets)
            if self.module.training:
                calls.check(loss)
                buffers.check(loss)
        buffers.write_back()
        leaves, self._record.output = output_leaves(output)
        return (loss,) if self.module.training else (loss, *leaves)

    def _loss_of(self, output: Any, targets: list[Tensor]) -> Tensor:
        if self.module.training:
            return self._checked_loss(output, targets)
        if not self.is_scored:
            return torch.zeros(())
        try:
            return self._checked_loss(output, targets)
        except Exception as error:  # whatever the user's code may raise
            raise LossRefuses(refusal(error)) from error

    def _checked_loss(self, output: Any, targets: list[Tensor]) -> Tensor:
        loss = self.loss(output, self.example.target.unflatten(targets))
        check_loss(loss)
        return loss

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """The module's output for the leaves of an input."""
        with casting(self.autocast):
            return call_model(self.module, self.example.input.unflatten(inputs))

    @property
    def last_output(self) -> Structure:
        """How the output of the last call was built."""
        if self._record.output is None:
            raise CaptureError("the model was not run")
        return self._record.output

    def held(self) -> PythonState:
        """What module and loss keep in Python and read there, as it is now."""
        return PythonState(self._roots, code=True)


class _Record:
    """Out of reach of torch.export, which puts a module's plain attributes back."""

    output: Structure | None = None


def casting(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """A job's autocast: a weight that is used several times inside is cast once."""
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def call_model(module: nn.Module, value: Any) -> Any:
    """A tuple is passed as `module(*value)`, a dict as `module(**value)`."""
    if isinstance(value, tuple):
        return module(*value)
    if isinstance(value, dict):
        return module(**value)
    return module(value)


def check_loss(loss: object) -> None:
    """Raises CaptureError: no tensor with one floating-point number."""
    if not isinstance(loss, Tensor):
        raise CaptureError(
            f"the loss must be a tensor with one number, but it is a {type(loss).__name__}"
        )
    if loss.dim() != 0 or not loss.dtype.is_floating_point:
        shape = [int(n) if type(n) is int else "batch" for n in loss.shape]
        raise CaptureError(
            f"the loss must be one floating-point number (shape []), but it has shape {shape} and "
            f"type {loss.dtype}. Take its mean over the samples"
        )


def output_leaves(output: Any) -> tuple[list[Tensor], Structure]:
    """The tensors of a model's output, and how it is built."""
    return structure_of(output, _kept, is_leaf=_is_cache)


_KEPT = bool | int | float | complex | str | bytes | enum.Enum | torch.dtype | torch.device


def _kept(leaf: object) -> object:
    if leaf is None or isinstance(leaf, _KEPT):
        return leaf
    return None if _is_cache(leaf) else Foreign.of(leaf)


def _is_cache(value: Any) -> bool:
    """Key/value caches of text generation: they serve no metric and would travel at each eval."""
    return hasattr(value, "get_seq_length") or type(value).__name__.endswith("Cache")
