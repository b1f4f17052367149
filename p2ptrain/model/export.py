"""Model and loss through `torch.export`, in train and in evaluation mode.

The two travel as one graph, so that the last stage computes the loss wherever it is. Two things
that torch.export gets wrong silently are put right here, each seen with torch 2.13: a buffer that
is reassigned (`self.ema = ...`) or written through `out=` keeps its old value, and attributes that
forward() assigns stay symbolic in the user's module.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from p2ptrain.errors import CaptureError
from p2ptrain.model.above_autograd import told_eager
from p2ptrain.model.causal_masks import CausalMasks
from p2ptrain.model.derivatives import DifferentiatesError, derivatives_as_traced
from p2ptrain.model.export_errors import LossRefuses, explain, next_least, refusal
from p2ptrain.model.held import Held
from p2ptrain.model.modes import calls_as_traced
from p2ptrain.model.quiet import torch_is_quiet
from p2ptrain.model.reassigned_buffers import KeptBuffersError, ReassignedBuffers
from p2ptrain.model.repeated import Twice, refuse_changing, repeats
from p2ptrain.model.seeded import unseeded
from p2ptrain.model.structure import Foreign, Structure, structure_of
from p2ptrain.model.traced_functions import (
    Place,
    UndefinedGradientsError,
    own_backwards_as_traced,
)
from p2ptrain.model.tracing import as_written, refuse_gradient_hooks
from p2ptrain.model.trial_runs import TrialRuns, resized
from p2ptrain.model.unseen import Unseen, uses_buffer

_log = logging.getLogger(__name__)

Loss = Callable[[Any, Any], Tensor]

_EXPORT_BATCHES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)
"""Batch sizes to trace with: odd ones, so that no other dimension is mistaken for the batch."""
_LARGE = (211, 223, 227, 229, 233, 239)
"""The same, for models that need many samples."""
_MOST_GUESSES = 8
"""Times that a model is traced, each with what the last time has shown of its gradients."""
_MOST_BOUNDS = 4
"""Lower bounds of the batch size that are tried before the last."""


@dataclass(frozen=True, slots=True)
class Exported:
    """One mode's graph.

    Attributes:
        program: inputs are the model's input leaves, then the target's.
        output: how the model's output is built; its leaves follow the loss in evaluation mode.
    """

    program: torch.export.ExportedProgram
    output: Structure


@dataclass(frozen=True, slots=True)
class Example:
    """A batch, taken apart.

    Attributes:
        input, target: how the two are built.
        input_leaves, target_leaves: tensors with the batch in dimension 0.
    """

    input: Structure
    target: Structure
    input_leaves: list[Tensor]
    target_leaves: list[Tensor]


class Scored(nn.Module):
    """The user's module, then the user's loss, over flat leaves.

    Attributes:
        as_eager: whether libraries that ask are told that nothing is exported.
        differentiates: whether forward() or the loss is known to take derivatives.
        undefined: outputs of functions with their own backward for which no gradient arrives.
        copied: paths of buffers that the model computes with a copy of: it replaces them, and its
            backward needs what was there before.
        is_scored: whether the loss is computed in evaluation mode too; a zero stands for it if not.
    """

    def __init__(self, module: nn.Module, loss: Loss, example: Example) -> None:
        super().__init__()
        self.module = module
        self.loss = loss
        self.as_eager = True
        self.differentiates = False
        self.undefined = frozenset[Place]()
        self.copied = frozenset[str]()
        self.is_scored = True
        self.masks = CausalMasks()
        self._roots = {"": module, "loss": loss}
        self.unseen = Unseen(self, self._roots)
        self._example = example
        self._record = _Record()

    def forward(self, inputs: list[Tensor], targets: list[Tensor]) -> tuple[Tensor, ...]:
        """The loss, and in evaluation mode the tensors of the model's output."""
        self.masks.begin()
        held = self.held()
        self.unseen.begin(held)
        buffers = ReassignedBuffers(held, self.copied)
        with (
            calls_as_traced(),
            unseeded(value for *_, value in held.values()),
            told_eager() if self.as_eager else contextlib.nullcontext(),
            derivatives_as_traced(expected=self.differentiates),
            own_backwards_as_traced(self.undefined, training=self.module.training) as calls,
        ):
            output = self.run(inputs)
            loss = self._loss_of(output, targets)
            if self.module.training:
                calls.check(loss)
                buffers.check(loss)
        self._record.regrown = buffers.write_back()
        self.unseen.end()
        self._record.changed = held.changed()
        leaves, structure = structure_of(output, _kept, is_leaf=_is_cache)
        self._record.output = structure
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
        loss = self.loss(output, self._example.target.unflatten(targets))
        _check_loss(loss)
        return loss

    def plain_loss(self, inputs: Sequence[Tensor], targets: list[Tensor]) -> Tensor:
        """The loss as plain torch has it, without all that a trace needs."""
        return self._checked_loss(self.run(inputs), targets)

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """The module's output for the leaves of an input."""
        return call_model(self.module, self._example.input.unflatten(inputs))

    @property
    def last_output(self) -> Structure:
        """How the output of the last call was built."""
        if self._record.output is None:
            raise CaptureError("the model was not run")
        return self._record.output

    def held(self) -> Held:
        """What module and loss keep in Python, as it is now."""
        return Held(self._roots)

    @property
    def changed(self) -> Sequence[str]:
        """Paths of what the last call changed of that."""
        return self._record.changed

    def check(self, program: torch.export.ExportedProgram) -> None:
        """Refuse what `program` computes with although forward() replaces it.

        Raises:
            CaptureError: there is such a thing.
        """
        self.unseen.check(program)
        for path, buffer in self._record.regrown:
            if uses_buffer(program, path, buffer):
                raise CaptureError(
                    f"forward() or the loss replaces the buffer {path!r} by one of another shape "
                    "or type; buffers keep theirs"
                )


class _Record:
    """Out of reach of torch.export, which puts a module's plain attributes back."""

    output: Structure | None = None
    changed: Sequence[str] = ()
    regrown: Sequence[tuple[str, Tensor]] = ()


def call_model(module: nn.Module, value: Any) -> Any:
    """A tuple is passed as `module(*value)`, a dict as `module(**value)`."""
    if isinstance(value, tuple):
        return module(*value)
    if isinstance(value, dict):
        return module(**value)
    return module(value)


def export(scored: Scored, example: Example, training: bool) -> Exported:
    """Trace one mode; the user's module is as it was afterwards.

    Raises:
        CaptureError: the model cannot be exported; says where and what to change.
    """
    trials = _trials(scored, example)
    with (
        undisturbed(scored, training),
        _no_collections(),
        as_written(),
        scored.masks.known(),
    ):
        with _put_back(scored):
            scored.masks.learn(scored.module, lambda: scored.run(example.input_leaves))
        try:
            refuse_gradient_hooks(scored.module)
            inputs, targets, program = _export_large_enough(scored, example, trials)
            scored.check(program)
            if scored.changed:
                _refuse_unless_repeated(scored, inputs, targets)
        except CaptureError:
            raise
        except Exception as error:  # everything the user's code may raise, and torch.export's own
            raise explain(error, trials) from error
        finally:
            scored.unseen.put_back()
    return Exported(program, scored.last_output)


def _trials(scored: Scored, example: Example) -> TrialRuns:
    def run(inputs: list[Tensor], targets: list[Tensor]) -> None:
        with _put_back(scored):
            scored(inputs, targets)

    return TrialRuns(run, example.input_leaves, example.target_leaves)


def _export_large_enough(
    scored: Scored, example: Example, trials: TrialRuns
) -> tuple[list[Tensor], list[Tensor], torch.export.ExportedProgram]:
    """Export with few samples, which is quick; with many where only that many work.

    Returns:
        The leaves that it was exported with, and the program.
    """

    def exported(
        size: int,
    ) -> tuple[list[Tensor], list[Tensor], torch.export.ExportedProgram]:
        inputs = resized(example.input_leaves, size)
        targets = resized(example.target_leaves, size)
        return inputs, targets, _export_as_eager(scored, inputs, targets)

    few, many = (_export_batch(scored, example, sizes) for sizes in (_EXPORT_BATCHES, _LARGE))
    try:
        return exported(few)
    except Exception as error:  # whatever few samples make the user's code raise
        if isinstance(error, CaptureError) and not isinstance(error, LossRefuses):
            raise
        if trials.failure(few) is None or trials.failure(many) is not None:
            raise
        return exported(many)


def _export_as_eager(
    scored: Scored, inputs: list[Tensor], targets: list[Tensor]
) -> torch.export.ExportedProgram:
    """Export what the model does in plain torch; else what it does when it is told of the export.

    Libraries ask whether they are being exported and then compute otherwise: transformers makes an
    explicit mask where plain torch calls its causal attention kernel, which rounds differently.
    """
    scored.as_eager = True
    try:
        return _export(scored, scored, inputs, targets)
    except Exception:  # the other way is for whatever cannot be exported this way
        scored.as_eager = False
        return _export(scored, scored, inputs, targets)


def _refuse_unless_repeated(scored: Scored, inputs: list[Tensor], targets: list[Tensor]) -> None:
    """Refuse a model that computes with what the last export has seen it change.

    Raises:
        CaptureError: a second call would do something else than the first.
    """
    changed = scored.changed
    held = [value for *_, value in scored.held().values() if isinstance(value, Tensor)]
    try:
        twice = _export(scored, Twice(scored), _and_copies(inputs), _and_copies(targets))
    except Exception as error:  # of the second call, which meets what the first one has left
        _log.debug("a second call of forward() failed", exc_info=error)
        refuse_changing(changed)
    scored.unseen.put_back()
    if not repeats(twice, len(inputs), held):
        refuse_changing(changed)


def _export(
    scored: Scored, module: nn.Module, inputs: list[Tensor], targets: list[Tensor]
) -> torch.export.ExportedProgram:
    """Export `module`, of which `scored` is a part, for all batches but those too small for it."""
    scored.undefined = frozenset()
    for _ in range(_MOST_GUESSES):
        try:
            return _export_from_least(scored, module, inputs, targets)
        except DifferentiatesError:
            scored.differentiates = True
        except UndefinedGradientsError as error:
            scored.undefined = error.places
        except KeptBuffersError as error:
            scored.copied |= error.paths
    return _export_from_least(scored, module, inputs, targets)


def _export_from_least(
    scored: Scored, module: nn.Module, inputs: list[Tensor], targets: list[Tensor]
) -> torch.export.ExportedProgram:
    least = 0
    for _ in range(_MOST_BOUNDS):
        try:
            with _put_back(scored):
                return _trace(module, inputs, targets, least)
        except Exception as error:
            wanted = next_least(error, least)
            if wanted is None:
                raise
            least = wanted
    with _put_back(scored):
        return _trace(module, inputs, targets, least)


def _trace(
    module: nn.Module, inputs: list[Tensor], targets: list[Tensor], least: int
) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=least or None)
    dynamic = ([{0: batch} for _ in inputs], [{0: batch} for _ in targets])
    with torch_is_quiet():
        return torch.export.export(module, (inputs, targets), dynamic_shapes=dynamic, strict=False)


def _export_batch(scored: Scored, example: Example, sizes: Sequence[int]) -> int:
    """A batch size that is no dimension of any tensor, so that equal sizes are no coincidence."""
    taken = {size for tensor in scored.state_dict().values() for size in _sizes(tensor)}
    for leaf in (*example.input_leaves, *example.target_leaves):
        taken.update(leaf.shape[1:])
    return next((size for size in sizes if size not in taken), sizes[-1])


def _sizes(value: object) -> Sequence[int]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _and_copies(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The leaves twice, as tensors of their own: a trace knows them by their object."""
    return [*leaves, *(leaf.clone() for leaf in leaves)]


def _check_loss(loss: object) -> None:
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


_KEPT = bool | int | float | complex | str | bytes | enum.Enum | torch.dtype | torch.device


def _kept(leaf: object) -> object:
    if leaf is None or isinstance(leaf, _KEPT):
        return leaf
    return None if _is_cache(leaf) else Foreign.of(leaf)


def _is_cache(value: Any) -> bool:
    """Key/value caches of text generation: they serve no metric and would travel at each eval."""
    return hasattr(value, "get_seq_length") or type(value).__name__.endswith("Cache")


@contextlib.contextmanager
def undisturbed(scored: Scored, training: bool) -> Iterator[None]:
    """The module in the mode asked for; on leaving, everything that it keeps as it was.

    Parts that its author has put in evaluation mode stay in it, as in a loop of plain torch. Where
    the whole model is in it, as libraries give them, that means nothing. Parts with a `train` of
    their own, which keep normalisations in evaluation mode for one, rely on it being called.
    """
    with _put_back(scored):
        if training and scored.module.training:
            for part in scored.module.modules():
                if type(part).train is not nn.Module.train:
                    part.train()
        else:
            scored.module.train(training)
        yield


@contextlib.contextmanager
def _put_back(scored: Scored) -> Iterator[None]:
    """On leaving, attributes of every part, containers and helper objects are as they were."""
    before = scored.held()
    try:
        yield
    finally:
        before.put_back()


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Tracing makes millions of objects that stay; looking for garbage takes a fifth of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
