"""Module and loss as one callable, watched while traced; nested batches and outputs as flat lists.

Only tensors travel. Everything else in the tree of inputs, targets and outputs (flags, None, a
cache object) is kept by the data holder and put back in its place (`Structure`).
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from p2ptrain.errors import CaptureError, ScriptError
from p2ptrain.model.capture.export_errors import LossRefuses, refusal
from p2ptrain.model.tracing.autograd_functions import Place, own_backwards_as_traced
from p2ptrain.model.tracing.autograd_graph import derivatives_as_traced
from p2ptrain.model.tracing.function_modes import calls_as_traced
from p2ptrain.model.tracing.python_state import PythonState
from p2ptrain.model.tracing.untraced_changes import HeldTensors, ReassignedBuffers
from p2ptrain.model.tracing.value_decisions import ValueDecisions
from p2ptrain.model.tracing.vmap_autocast import reported_as_eager


@dataclass(frozen=True, slots=True)
class Structure:
    """The shape of a tree.

    Attributes:
        spec: the containers.
        constants: by position of the leaf, every leaf that is no tensor.
    """

    spec: pytree.TreeSpec
    constants: Mapping[int, object]

    @property
    def tensors(self) -> int:
        """How many tensors the tree holds."""
        return self.spec.num_leaves - len(self.constants)

    def flatten(self, tree: Any) -> list[torch.Tensor]:
        """The tensors of `tree`, which must be built like the example was.

        Raises:
            ScriptError: it is not.
        """
        leaves, spec = pytree.tree_flatten(plain(tree))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if spec != self.spec or len(tensors) != self.tensors:
            raise ScriptError(
                "every sample must be built like the first one: the same tuples, lists and dicts "
                f"with a tensor in the same places (expected {self.spec}, got {spec})"
            )
        return tensors

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The tree with `tensors` in it, in the order of `flatten`."""
        remaining = iter(tensors)
        leaves = [
            self.constants[position] if position in self.constants else next(remaining)
            for position in range(self.spec.num_leaves)
        ]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, slots=True)
class Foreign:
    """Stands for a leaf that cannot be kept: what it holds differs from batch to batch.

    Attributes:
        what: what it is, with its article, for messages.
    """

    what: str

    @classmethod
    def of(cls, leaf: object) -> Foreign:
        """The one that stands for `leaf`."""
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            return cls("a number that follows from the batch size")
        name = type(leaf).__qualname__
        return cls(f"an {name}" if name[0] in "AEIOaeio" else f"a {name}")


class _IsLeaf(Protocol):
    def __call__(self, value: Any) -> bool: ...


def structure_of(
    tree: Any, keep: Callable[[object], object], is_leaf: _IsLeaf | None = None
) -> tuple[list[torch.Tensor], Structure]:
    """Take `tree` apart.

    Args:
        tree: containers and leaves.
        keep: maps a leaf that is no tensor to what is kept of it.
        is_leaf: containers for which it is True are not opened.
    """
    leaves, spec = pytree.tree_flatten(plain(tree), is_leaf=is_leaf)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    constants = {
        position: keep(leaf)
        for position, leaf in enumerate(leaves)
        if not isinstance(leaf, torch.Tensor)
    }
    return tensors, Structure(spec, constants)


def plain(tree: Any) -> Any:
    """`tree`, with a mapping that is no dict (a tokenizer's result) made one."""
    return dict(tree) if isinstance(tree, Mapping) and not _registered(tree) else tree


def _registered(value: object) -> bool:
    return type(value) in pytree.SUPPORTED_NODES


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
        self.decisions = ValueDecisions()
        self._roots = {"": module, "loss": loss}
        self.kept_tensors = HeldTensors(self, self.held())
        self.example = example
        self._record = _Record()

    def forward(self, inputs: list[Tensor], targets: list[Tensor]) -> tuple[Tensor, ...]:
        """The loss, and in evaluation mode the tensors of the model's output."""
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
    if isinstance(loss, int | float | torch.SymInt | torch.SymFloat):
        raise CaptureError("the loss is a number, not a tensor: leave out .item() or float()")
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
