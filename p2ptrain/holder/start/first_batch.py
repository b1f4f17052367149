"""The first batches of the data, computed by the user's own module.

`PlainBatches` and `compared`: what is captured computes the same.

`explained`, where the capture or the trial has failed: why, in the user's words. The module
computes the batch as the job has it, with all its samples. If that fails as well, its layer and the
types, sizes and labels of the data are compared with what the layer takes. If it does not, the
number of samples is the cause.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from p2ptrain.errors import CaptureError, ScriptError, UserError
from p2ptrain.holder.input.batch_layout import ReadBatch
from p2ptrain.holder.input.checked_dataset import Collated
from p2ptrain.holder.input.micro_batch_weights import Batch
from p2ptrain.holder.input.mini_batches import BatchSource, SampleReader, first_samples
from p2ptrain.holder.input.open_data import OpenedEvaluation
from p2ptrain.holder.start.micro_batch import COMPUTED_TOGETHER
from p2ptrain.job.job import Job
from p2ptrain.logs import get_logger, timed
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.capture.comparison import compare
from p2ptrain.model.capture.export_errors import FailsItself, apart_from, user_place
from p2ptrain.model.capture.plain_run import ComparedBatches, PlainRun, left_alone, run_plainly
from p2ptrain.model.capture.scored_module import call_model
from p2ptrain.model.capture.trial_runs import silence_torch_logs
from p2ptrain.model.stage.failures import first_line
from p2ptrain.model.stage.random_operators import randomness_lock
from p2ptrain.process.memory_budget import is_out_of_memory, usable_memory_bytes

log = get_logger(__name__)

COMPARED = ComparedBatches()
"""On which the captured model is compared with the user's own."""

_NOT_COMPARED = (
    "the captured model was not compared with the module itself: there is too little memory here "
    "for another copy of its weights and their gradients"
)

_COPIES = 4
"""Of trained weights: as they were, their gradients, those before them, and values between."""

_WIDTHS = {
    nn.Linear: ("in_features", -1),
    nn.Bilinear: ("in1_features", -1),
    nn.modules.conv._ConvNd: ("in_channels", 1),
    nn.modules.batchnorm._NormBase: ("num_features", 1),
    nn.RNNBase: ("input_size", -1),
    nn.GroupNorm: ("num_channels", 1),
}
"""Layers that take so many values in one dimension of their input."""

_CASTS = {
    torch.float32: ".float()",
    torch.float64: ".double()",
    torch.bfloat16: ".bfloat16()",
    torch.float16: ".half()",
}

_IGNORED = -100


def explained(
    module: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batches: Sequence[tuple[Collated, Collated]],
    error: UserError,
) -> UserError:
    """`error`, or in its place why plain torch does not compute these batches.

    Args:
        batches: (input, target): the job's first one, and any other that `error` may come from.
    """
    for index, batch in enumerate(batches):
        run = _FirstRun(module, loss)
        failure = run.failure(batch)
        if isinstance(failure, UserError):  # p2ptrain's own words: of a loss that is not there
            return failure
        if failure is not None:
            return error if is_out_of_memory(failure) else ScriptError(run.words(batch, failure))
        if index == 0 and isinstance(error, FailsItself):
            return _one_size(run, batch, error)
    return error


def _one_size(run: _FirstRun, batch: tuple[Collated, Collated], error: FailsItself) -> CaptureError:
    samples = len(_leaves(batch)[0])
    fewer = run.failure(_cut(batch, samples - 1)) if samples > 1 else None
    own = error.own if fewer is None else fewer
    place = user_place(own)
    at = "" if place is None else f" at {place}"
    if fewer is None:
        return CaptureError(
            f"the model cannot be captured, though plain torch computes its first batch: it fails"
            f"{at}: {type(own).__name__}: {first_line(own)}"
        )
    return CaptureError(
        f"the model computes the job's mini-batch of {samples} samples in plain torch, and fails "
        f"with {samples - 1}{at}: {first_line(own)}. p2ptrain captures a model for any number of "
        "samples. Where samples belong together (the nodes of a graph), let one sample of the data "
        f"hold all of them, and the model take a batch of such samples: x of shape [1, {samples}, "
        "...], batch_size=1"
    )


class _FirstRun:
    """Of the user's module and loss, with a note of the layer that was computed last."""

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Tensor]) -> None:
        self._module = module
        self._loss = loss
        self._layers: list[tuple[str, nn.Module, tuple[Any, ...]]] = []
        self._output: object = None
        self._is_computed = False

    def failure(self, batch: tuple[Collated, Collated]) -> Exception | None:
        """What a forward and the loss raise; the module's buffers and layers stay as they were."""
        self._layers.clear()
        self._is_computed = False
        handled = sys.exception()
        try:
            with (
                randomness_lock,
                left_alone(self._module, self._loss),
                self._watching(),
                silence_torch_logs(),
                torch.enable_grad(),
            ):
                self._output = call_model(self._module, batch[0])
                self._is_computed = True
                self._loss(self._output, batch[1])
        except Exception as error:  # whatever the user's code may raise: it is shown
            return apart_from(error, handled)
        return None

    def words(self, batch: tuple[Collated, Collated], error: Exception) -> str:
        """What the user wrote that torch refuses."""
        why = self._of_loss(batch[1], error) if self._is_computed else self._of_layer(batch[0])
        place = user_place(error)
        at = f"at {place}: " if place else ""
        beside = f"{why}. ({type(error).__name__}: {first_line(error)})"
        if not why:
            beside = f"{self._where()}{type(error).__name__}: {first_line(error)}"
            if self._is_computed:
                beside += f" (the model gives {_shown(self._output)}, the target is "
                beside += f"{_shown(batch[1])})"
        return f"the model or its loss fails on the first batch, in plain torch too: {at}{beside}"

    def _where(self) -> str:
        if self._is_computed or not self._layers:
            return ""
        name, layer, _ = self._layers[-1]
        return f"in {_layer(name, layer)}: "

    @contextmanager
    def _watching(self) -> Iterator[None]:
        handles = []
        for name, part in self._module.named_modules():
            if not list(part.children()):
                handles += self._watched(name, part)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _watched(self, name: str, part: nn.Module) -> list[Any]:
        def entered(_: nn.Module, given: tuple[Any, ...]) -> None:
            self._layers.append((name, part, given))

        def left(*_: object) -> None:
            self._layers.pop()

        return [part.register_forward_pre_hook(entered), part.register_forward_hook(left)]

    def _of_layer(self, given: Collated) -> str:
        """What the layer takes, and what it is given instead; "" where that is not why."""
        if not self._layers:
            return ""
        name, layer, arguments = self._layers[-1]
        x = next((leaf for leaf in _leaves(arguments)), None)
        if x is None:
            return ""
        is_data = any(_is_of(x, leaf) for leaf in _leaves(given))
        return (
            _other_type(layer, x, _layer(name, layer), is_data)
            or _other_width(layer, x, _layer(name, layer), is_data)
            or _no_index(layer, x, _layer(name, layer), is_data)
        )

    def _of_loss(self, target: Collated, error: Exception) -> str:
        outputs, targets = _leaves(self._output), _leaves(target)
        if not outputs or not targets:
            return ""
        output, labels = outputs[0], targets[0]
        said = str(error)
        if labels.is_floating_point() and ("Long" in said or "Byte" in said):
            return (
                "cross_entropy takes class numbers (int64) as targets; the targets are "
                f"{_type(labels)}: y.long()"
            )
        if "out of bounds" in said and not labels.is_floating_point() and output.dim() > 1:
            used = labels[labels != _IGNORED]
            classes = output.shape[1]
            if used.numel() and (used.max() >= classes or used.min() < 0):
                low, high = int(used.min()), int(used.max())
                what = f"go up to {high}" if high >= classes else f"go down to {low}"
                return f"labels {what}, but the model has {classes} outputs (0 to {classes - 1})"
        return ""


def _other_type(layer: nn.Module, x: Tensor, name: str, is_data: bool) -> str:
    weight = next((p for p in layer.parameters() if p.is_floating_point()), None)
    if weight is None or x.dtype is weight.dtype or isinstance(layer, nn.Embedding):
        return ""
    if is_data:
        advice = f"x{_CASTS.get(weight.dtype, f'.to({weight.dtype})')}"
        other = _CASTS.get(x.dtype)
        advice += f" in the data, or model{other}" if other else " in the data"
        return f"the input is {_type(x)}, the model {_type(weight)} ({name}): {advice}"
    return f"{name} is {_type(weight)} and is given {_type(x)}"


def _other_width(layer: nn.Module, x: Tensor, name: str, is_data: bool) -> str:
    for kind, (attribute, place) in _WIDTHS.items():
        if not isinstance(layer, kind):
            continue
        wanted = getattr(layer, attribute)
        has = x.shape[place] if x.dim() > max(place, 0) else None
        if not wanted or has == wanted:
            return ""
        unit = "numbers a sample" if place == -1 else "channels"
        giver = "the data has" if is_data else "it is given"
        shape = f"{giver} shape {list(x.shape)}"
        return f"{name} expects {wanted} {unit}, {shape if has is None else f'{giver} {has}'}"
    return ""


def _no_index(layer: nn.Module, x: Tensor, name: str, is_data: bool) -> str:
    if not isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return ""
    whose = "the data's" if is_data else "the given"
    if x.is_floating_point():
        return f"{name} takes whole numbers (int64); {whose} are {_type(x)}"
    if not x.numel():
        return ""
    most, low, high = layer.num_embeddings, int(x.min()), int(x.max())
    if low >= 0 and high < most:
        return ""
    what = f"go up to {high}" if high >= most else f"go down to {low}"
    return f"{name} has {most} entries (0 to {most - 1}), {whose} indices {what}"


def _layer(name: str, layer: nn.Module) -> str:
    return f'layer "{name}" ({type(layer).__name__})' if name else f"the {type(layer).__name__}"


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shown(value: object) -> str:
    shown = ", ".join(f"{_type(leaf)} {list(leaf.shape)}" for leaf in _leaves(value))
    return shown or type(value).__name__


def _is_of(x: Tensor, leaf: Tensor) -> bool:
    """Whether `x` is the data itself, or a view of it."""
    with suppress(RuntimeError):
        return x.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()
    return False


def _leaves(value: object) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _cut(batch: tuple[Collated, Collated], samples: int) -> tuple[Collated, Collated]:
    cut: tuple[Collated, Collated] = torch.utils._pytree.tree_map(lambda t: t[:samples], batch)
    return cut


class PlainBatches:
    """What the user's own module computes on the first batches of a job.

    Args:
        newest: of those that came late, of other sizes: it takes the place of the second.
    """

    def __init__(
        self,
        job: Job,
        samples: SampleReader,
        batches: BatchSource,
        evaluation: OpenedEvaluation | None,
        newest: ReadBatch | None = None,
    ) -> None:
        self._job, self._samples, self._batches, self._newest = job, samples, batches, newest
        self._evaluated = None if evaluation is None else evaluation.samples

    def computed(self, least: int) -> PlainRun | None:
        """That; None where memory is short.

        Args:
            least: samples of a batch.
        """
        job = self._job
        if not _has_room(job.model):
            return None
        whole = job.fixed_micro_batch or min(job.batch_size, COMPUTED_TOGETHER)
        steps = len(self._samples) // job.batch_size * job.epochs
        try:
            return run_plainly(
                job.model,
                job.loss_function,
                self._batch,
                None if self._evaluated is None else self._evaluation,
                range(min(least, whole), whole + 1),
                replace(COMPARED, most=max(1, min(COMPARED.most, steps))),
                autocast=job.autocast,
                mini_batch=job.batch_size if 0 < job.fixed_micro_batch < job.batch_size else 0,
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _batch(self, step: int, samples: int) -> Batch:
        if step == 1 and self._newest is not None:
            return self._newest.rows(0, samples)
        return first_samples(self._batches, step, samples)

    def _evaluation(self, _: int, samples: int) -> Batch:
        assert self._evaluated is not None
        return self._evaluated.collate(range(min(samples, len(self._evaluated))))


def compared(module: nn.Module, captured: Captured, run: PlainRun | None) -> tuple[str, ...]:
    """Compare what is captured with what the module has computed; a line for each rounding.

    Raises:
        CaptureError: it is another model; names what differs.
    """
    failed_for_memory = (
        run is not None and run.failure is not None and is_out_of_memory(run.failure)
    )
    if run is None or failed_for_memory or not _has_room(module):
        return (_NOT_COMPARED,)
    try:
        with timed(log, "compared"):
            found = compare(module, captured, run)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return (_NOT_COMPARED,)
    log.info("compared_batches", batches=found.batches, skipped=found.skipped)
    said = [found.inexact] if found.inexact else []
    if found.skipped:
        said.append(f"the captured model was compared on {found.batches} batches: {found.skipped}")
    return tuple(said)


def _has_room(module: nn.Module) -> bool:
    """For what the module, or what is captured, computes with weights of its own.

    No error says it where a control group has a limit: the kernel ends the process.
    """
    tensors = [*module.parameters(), *module.buffers()]
    needed_bytes = sum(t.nbytes * (_COPIES if t.requires_grad else 1) for t in tensors)
    return needed_bytes <= usable_memory_bytes()
