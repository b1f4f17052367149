"""Model and loss through `torch.export`, in train and in evaluation mode.

The two travel as one graph, so that the last stage computes the loss wherever it is. Two things
that torch.export gets wrong silently are put right here: a buffer that is reassigned
(`self.ema = ...`) or written through `out=` keeps its old value, and attributes that forward()
assigns stay symbolic in the user's module.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from p2ptrain.errors import CaptureError
from p2ptrain.model.capture.export_errors import (
    Bounds,
    LossRefuses,
    explain,
    is_of_values,
    next_bounds,
)
from p2ptrain.model.capture.scored_module import Example, ScoredModule, Structure
from p2ptrain.model.capture.trial_runs import TrialRuns, resized, silence_torch_logs
from p2ptrain.model.tracing.autograd_functions import UndefinedGradientsError
from p2ptrain.model.tracing.autograd_graph import DifferentiatesError
from p2ptrain.model.tracing.trace_patches import as_written, without_backward_hooks
from p2ptrain.model.tracing.untraced_changes import KeptBuffersError

_EXPORT_BATCHES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)
"""Batch sizes to trace with: odd ones, so that no other dimension is mistaken for the batch."""

_LARGE = (211, 223, 227, 229, 233, 239)
"""The same, for models that need many samples."""

_MAX_GUESSES = 8
"""Times that a model is traced, each with what the last time has shown of its gradients."""

_MAX_BOUNDS = 4
"""Bounds of the batch size that are tried before the last."""


_RANDOM_RUNS = 5
"""With other random numbers each, to see whether the model's decisions follow from them."""


@dataclass(frozen=True, slots=True)
class Exported:
    """One mode's graph.

    Attributes:
        program: inputs are the model's input leaves, then the target's.
        output: how the model's output is built; its leaves follow the loss in evaluation mode.
    """

    program: torch.export.ExportedProgram
    output: Structure


def export(scored: ScoredModule, example: Example, training: bool) -> Exported:
    """Trace one mode; the user's module is as it was afterwards.

    Raises:
        CaptureError: the model cannot be exported; says where and what to change.
    """
    trials = _trials(scored, example)
    with (
        undisturbed(scored, training),
        _no_collections(),
        as_written(),
        without_backward_hooks(scored.module),
    ):
        try:
            program = _export_deciding(scored, example, trials)
        except CaptureError:
            raise
        except Exception as error:  # everything the user's code may raise, and torch.export's own
            raise explain(error, trials) from error
        finally:
            scored.kept_tensors.put_back()
    return Exported(program, scored.last_output)


def _trials(scored: ScoredModule, example: Example) -> TrialRuns:
    def run(inputs: list[Tensor], targets: list[Tensor]) -> None:
        with _put_back(scored):
            scored(inputs, targets)

    return TrialRuns(run, example.input_leaves, example.target_leaves)


def _export_deciding(
    scored: ScoredModule, example: Example, trials: TrialRuns
) -> torch.export.ExportedProgram:
    """Export, going the way of the first samples where the model decides on their values."""
    scored.decisions.forget()
    try:
        return _export_large_enough(scored, example, trials)
    except Exception as error:
        if not is_of_values(error) or not _learn_decisions(scored, example):
            raise
        return _export_large_enough(scored, example, trials)


def _learn_decisions(scored: ScoredModule, example: Example) -> bool:
    """Whether all samples, and each half of them, go the same way with any random numbers."""
    leaves = [example.input_leaves, example.target_leaves]
    half = example.input_leaves[0].shape[0] // 2

    def run(part: slice, seed: int) -> None:
        inputs, targets = ([leaf[part].clone() for leaf in some] for some in leaves)
        with _put_back(scored), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # a trace may not reseed torch
            scored(inputs, targets)

    state = [(t, t.clone()) for t in scored.module.buffers()]
    try:
        parts = [slice(half), slice(half, None), *[slice(None)] * _RANDOM_RUNS]
        return scored.decisions.learn([partial(run, p, seed) for seed, p in enumerate(parts)])
    except Exception:  # the trace fails in the same place, and is explained
        return False
    finally:
        for tensor, before in state:
            tensor.copy_(before)


def _export_large_enough(
    scored: ScoredModule, example: Example, trials: TrialRuns
) -> torch.export.ExportedProgram:
    """Export with few samples, which is quick; with many where only that many work."""

    def exported(size: int) -> torch.export.ExportedProgram:
        inputs = resized(example.input_leaves, size)
        targets = resized(example.target_leaves, size)
        return _export_as_eager(scored, inputs, targets)

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
    scored: ScoredModule, inputs: list[Tensor], targets: list[Tensor]
) -> torch.export.ExportedProgram:
    """Export what the model does in plain torch; failing that, what it does while exported.

    Libraries ask whether they are being exported and then compute otherwise: transformers makes an
    explicit mask where plain torch calls its causal attention kernel, which rounds differently.
    """
    scored.as_eager = True
    try:
        return _export(scored, inputs, targets)
    except Exception:  # the other way is for whatever cannot be exported this way
        scored.as_eager = False
        return _export(scored, inputs, targets)


def _export(
    scored: ScoredModule, inputs: list[Tensor], targets: list[Tensor]
) -> torch.export.ExportedProgram:
    """Export `scored` for all batches of a size that it takes."""
    scored.undefined = frozenset()
    for _ in range(_MAX_GUESSES):
        try:
            return _export_within(scored, inputs, targets)
        except DifferentiatesError:
            scored.differentiates = True
        except UndefinedGradientsError as error:
            scored.undefined = error.places
        except KeptBuffersError as error:
            scored.copied |= error.paths
    return _export_within(scored, inputs, targets)


def _export_within(
    scored: ScoredModule, inputs: list[Tensor], targets: list[Tensor]
) -> torch.export.ExportedProgram:
    leaves = range(len(inputs) + len(targets))
    bounds: Bounds = (0, None)
    dynamic = [scored.example.dynamic(leaf) for leaf in leaves]
    for _ in range(_MAX_BOUNDS):
        try:
            with _put_back(scored):
                return _trace(scored, inputs, targets, bounds, dynamic)
        except Exception as error:
            wanted = next_bounds(error, bounds)
            if wanted is None:
                raise
            bounds = wanted
    with _put_back(scored):
        return _trace(scored, inputs, targets, bounds, dynamic)


def _trace(
    module: nn.Module,
    inputs: list[Tensor],
    targets: list[Tensor],
    bounds: Bounds,
    lengths: Sequence[Mapping[int, int]],
) -> torch.export.ExportedProgram:
    """`lengths`: by leaf, dimensions that differ from batch to batch."""
    least, most = bounds
    batch = torch.export.Dim("batch", min=least or None, max=most)
    sizes = [{0: batch, **dict.fromkeys(more, torch.export.Dim.AUTO)} for more in lengths]
    dynamic = (sizes[: len(inputs)], sizes[len(inputs) :])
    with silence_torch_logs():
        return torch.export.export(module, (inputs, targets), dynamic_shapes=dynamic, strict=False)


def _export_batch(scored: ScoredModule, example: Example, sizes: Sequence[int]) -> int:
    """A batch size that is no dimension of any tensor, so that equal sizes are no coincidence."""
    taken = {size for tensor in scored.state_dict().values() for size in _sizes(tensor)}
    for leaf in (*example.input_leaves, *example.target_leaves):
        taken.update(leaf.shape[1:])
    return next((size for size in sizes if size not in taken), sizes[-1])


def _sizes(value: object) -> Sequence[int]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


@contextlib.contextmanager
def undisturbed(scored: ScoredModule, training: bool) -> Iterator[None]:
    """The module in the mode asked for; on leaving, everything that it keeps as it was."""
    with _put_back(scored):
        set_mode(scored.module, training=training)
        yield


def set_mode(module: nn.Module, *, training: bool) -> None:
    """As a loop of plain torch has it.

    Parts that its author has put in evaluation mode stay in it. Where the whole model is in it, as
    libraries give them, that means nothing. Parts with a `train` of their own, which keep
    normalisations in evaluation mode for one, rely on it being called.
    """
    if training and module.training:
        for part in module.modules():
            if type(part).train is not nn.Module.train:
                part.train()
    else:
        module.train(training)


@contextlib.contextmanager
def _put_back(scored: ScoredModule) -> Iterator[None]:
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
