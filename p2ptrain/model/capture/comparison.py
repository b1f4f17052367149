"""Whether what was captured computes what the user's own module did, on the job's first batches.

A trace sees a model once. State that it does not see makes the captured model another one, without
a word. So all stages together compute the batches of `plain_run` before the first step, with the
same changes of the weights between, and must give the same losses, gradients, buffers and outputs.
They have weights of their own: others may read the user's meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from p2ptrain.errors import CaptureError, UserError
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.capture.kept_values import Difference, KeptValues, difference
from p2ptrain.model.capture.plain_run import (
    Batch,
    PlainEvaluation,
    PlainRun,
    PlainStep,
    SeededError,
    changing_layer,
    copied,
    kept_gradient,
    nudge,
    seeded_with,
)
from p2ptrain.model.graph.checked_operators import EXPECT, UNLIKE
from p2ptrain.model.graph.description import TensorKind
from p2ptrain.model.stage.failures import OPERATORS_RAISE, first_line
from p2ptrain.model.stage.mutated_state import written_names
from p2ptrain.model.stage.stage import Stage
from p2ptrain.process.memory_budget import is_out_of_memory

_SMALL = 1e-4
"""A gradient below this share of the largest one is measured against that share: it may be zero but
for rounding, as that of a bias in front of a normalisation."""

_PIECES = 8

_IN_FORWARD = (
    "Something changes from call to call, or with the weights, that a trace does not see: an "
    "iterator, a generator, an attribute or a counter, a list, a file, what a library keeps, "
    "random numbers that are not torch's or are seeded, torch.set_autocast_enabled, an own "
    "backward that writes to what it has not made. Keep it in a buffer that is written in place, "
    "self.register_buffer(name, torch.tensor(...)), draw random numbers with torch, use `with "
    "torch.autocast(...)`, write to a copy, or leave it out"
)

_UNPADDED = (
    "micro-batches without padding are computed by another kernel than in plain torch, equal to "
    "rounding (transformers: attn_implementation='eager' gives equal bits)"
)

_SEEDS = (
    "forward() or the loss seeds a torch.Generator that it keeps, so that its random numbers are "
    "the same for every batch; devices would draw others. Draw them once in __init__, into a "
    "buffer: self.register_buffer(name, torch.randn(...))"
)

_IN_BACKWARD = (
    "Something changes gradients, or who gets one, that a trace does not see: a backward hook "
    "(x * a + (x * (1 - a)).detach() scales the gradient of x by a), saved_tensors_hooks that lose "
    "digits, requires_grad_() of a parameter in forward() (compute with parameter.detach(), or "
    "freeze it before training), a backward of an own function that keeps something, or writes to "
    "a gradient that arrives (write to a copy, gradient.clone())"
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What comparing has shown.

    Attributes:
        batches: that were compared.
        inexact: the first thing that differs by no more than rounding, and why; "" where nothing
            does.
        skipped: why no more was compared; "" where all was.
    """

    batches: int
    inexact: str = ""
    skipped: str = ""


def compare(module: nn.Module, captured: Captured, run: PlainRun) -> Comparison:
    """Compare `captured` with what `module` has computed.

    Args:
        module: is called only to find the layer that differs.

    Raises:
        CaptureError: they differ by more than other kernels may; names where.
    """
    if isinstance(run.failure, SeededError):
        raise CaptureError(_SEEDS)
    inexact, replay = "", _CapturedRun(captured)
    for batch, found in _differences(replay, captured, run):
        if not found.is_rounding:
            raise _refused(module, run, batch, found)
        is_unpadded = run.unpadded is not None and batch is run.unpadded.batch
        why = _UNPADDED if is_unpadded else f"other kernels than plain torch's: {found.text}"
        inexact = inexact or why
    if run.steps and any(node.operator == EXPECT for node in captured.description.train.nodes):
        replay.pieces(run.steps[0].batch)
    if run.failure is None or run.failed is None:
        return Comparison(len(run.steps), inexact)
    if not is_out_of_memory(run.failure):
        fails = f"the model or its loss fails on batch {len(run.steps) + 1} in plain torch"
        why = f"{type(run.failure).__name__}: {first_line(run.failure)}"
        if replay.takes(run.failed, len(run.steps)):
            raise CaptureError(f"{fails}, and what is captured does not: {why}")
        if not run.steps and replay.is_enough(run.failed):
            raise CaptureError(f"{fails} too: {why}")
    return Comparison(len(run.steps), inexact, f"the module itself fails: {run.failure}")


def _differences(
    replay: _CapturedRun, captured: Captured, run: PlainRun
) -> Iterator[tuple[Batch, Difference]]:
    """Whatever differs, with the batch where it does, in the order of the batches."""
    for number, step in enumerate(run.steps):
        for found in replay.step(step, number):
            yield step.batch, found
        nudge(replay.trained, number)
    if run.unpadded is not None:
        for found in replay.step(run.unpadded, len(run.steps)):
            yield run.unpadded.batch, found
    if run.evaluation is not None and _evaluates(captured, run.evaluation):
        for found in replay.evaluation(run.evaluation):
            yield run.evaluation.batch, found
    if run.again is not None:
        first = run.steps[0]
        what = "the loss of batch 1, where it is computed again,"
        found_again = difference(what, run.again, first.loss)
        if found_again is not None:
            yield first.batch, found_again


def _evaluates(captured: Captured, own: PlainEvaluation) -> bool:
    """Whether what is captured can; where the loss refuses these samples the evaluation says so."""
    is_scored = own.loss is not None or bool(captured.unscored)
    return is_scored and own.samples >= captured.evaluates.least


def _refused(module: nn.Module, run: PlainRun, batch: Batch, found: Difference) -> CaptureError:
    """With the layer, where calling the module twice shows one, and what its calls change."""
    layer = None if found.is_gradient else changing_layer(module, batch)
    notes = [f"{layer} gives something else for the same input"] if layer else []
    if run.changed:
        notes.append(f"its calls change {', '.join(run.changed[:4])}")
    notes += [f"it draws {whose}" for whose in run.draws]
    return CaptureError(
        "the captured model computes something else than the module itself in plain torch: "
        f"{'; '.join((found.text, *notes))}. {_IN_BACKWARD if found.is_gradient else _IN_FORWARD}"
    )


class _CapturedRun:
    """One stage that has captured all of the model, with weights of its own."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        description = captured.description
        units = len(description.units)
        apart = written_names(description, 0, units) | {
            tensor.name
            for tensor in description.tensors
            if tensor.trainable or tensor.kind is TensorKind.BUFFER
        }
        own = {t.name: captured.tensor(t.name).detach() for t in description.tensors}
        own = {name: t.clone() if name in apart else t for name, t in own.items()}
        state = own | {other: own[name] for other, name in description.tied.items()}
        self._stage = Stage(description, 0, units, state, copy=False)
        self._state = own | self._stage.state()
        trained = [tensor.name for tensor in description.tensors if tensor.trainable]
        self.trained = {name: self._state[name] for name in trained}

    def step(self, step: PlainStep, number: int) -> Iterator[Difference]:
        """What differs on one batch, the loss first."""
        batch = f"batch {number + 1}"
        loss = self._computed(step.batch, number)
        yield from self._found(f"the loss of {batch}", step.loss, KeptValues.of(loss))
        yield from self._gradients(step, batch)
        for name, own in step.buffers.items():
            if name in self._state:
                theirs = KeptValues.of(self._state[name])
                yield from self._found(f"the buffer {name!r} after {batch}", own, theirs)

    def pieces(self, batch: Batch) -> None:
        """Compute few samples at a time, of which a model that decides on values may do other.

        Raises:
            CaptureError: it does.
        """
        entering = self._captured.entering(batch[0], "train")
        targets = self._captured.targets(batch)
        few = self._captured.trains.least
        for first in range(0, min(entering[0].shape[0] + 1 - few, _PIECES * few), few):
            part = slice(first, first + few)
            self._run(0, [x[part].clone() for x in entering], [x[part].clone() for x in targets])
        for parameter in self.trained.values():
            parameter.grad = None

    def takes(self, batch: Batch, number: int) -> bool:
        """Whether a batch does not fail here."""
        try:
            self._computed(batch, number)
        except UserError:
            return False
        return True

    def is_enough(self, batch: Batch) -> bool:
        """Whether its samples are as many as the model needs."""
        samples = self._captured.entering(batch[0], "train")[0].shape[0]
        return samples >= self._captured.trains.least

    def evaluation(self, own: PlainEvaluation) -> Iterator[Difference]:
        """What differs in evaluation mode."""
        entering = self._captured.entering(own.batch[0], "eval")
        targets = self._captured.targets(own.batch)
        with seeded_with(0):
            loss, *outputs = self._stage.evaluate(entering, targets, seed=None)
        if own.loss is not None and not self._captured.unscored:
            yield from self._found("the loss in evaluation mode", own.loss, KeptValues.of(loss))
        for index, (one, other) in enumerate(zip(own.outputs, outputs, strict=False)):
            what = f"tensor {index} of the output in evaluation mode"
            yield from self._found(what, one, KeptValues.of(other))

    def _gradients(self, step: PlainStep, batch: str) -> Iterator[Difference]:
        """After which there are none any more."""
        largest = max((kept.largest for kept in step.gradients.values() if kept), default=0.0)
        for name, own in step.gradients.items():
            what = f"the gradient of {name!r} in {batch}"
            theirs = kept_gradient(self.trained[name]) if name in self.trained else None
            if own is not None and theirs is not None:
                for found in self._found(what, own, theirs, _SMALL * largest):
                    yield replace(found, is_gradient=True)
            elif own is not theirs:
                text = f"{what} is {_there(own)}, captured {_there(theirs)}"
                yield Difference(text, is_rounding=False, is_gradient=True)
        for parameter in self.trained.values():
            parameter.grad = None

    def _found(
        self, what: str, own: KeptValues, theirs: KeptValues, floor: float = 0.0
    ) -> tuple[Difference, ...]:
        found = difference(what, own, theirs, floor, self._captured.autocast)
        return () if found is None else (found,)

    def _computed(self, batch: Batch, number: int) -> Tensor:
        entering = self._captured.entering(copied(batch[0]), "train")
        return self._run(number, entering, self._captured.targets(copied(batch)))

    def _run(self, number: int, entering: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        try:
            with seeded_with(number):
                (loss,) = self._stage.forward(number, entering, targets, seed=None)
                self._stage.backward(number)
        except OPERATORS_RAISE as error:
            if is_out_of_memory(error):
                raise
            why = first_line(error)
            if why.startswith(UNLIKE):
                raise CaptureError(
                    f"the model decides on the values of its samples, which differ: {why}"
                ) from error
            raise CaptureError(
                "the captured model fails where the module itself does not in plain torch: "
                f"{why}. {_IN_FORWARD}"
            ) from error
        return loss


def _there(gradient: KeptValues | None) -> str:
    return "not there" if gradient is None else "there"
