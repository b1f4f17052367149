"""What the user's own module computes on the job's first batches, noted before anything traces it.

A trace runs a model and sees of its state only what torch follows. An iterator, an attribute of a
class, a file, a counter go on unseen, and each trace moves them. So the module itself computes the
first batches first, in the state in which plain torch would find it, with changes of its weights
between. `comparison` holds what is captured against what is noted here.

    module as it is ──► batch 1, weights change, batch 2, ... ──► as it was ──► traced ──► compared
"""

from __future__ import annotations

import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from p2ptrain.model.capture.captured import repeats_itself
from p2ptrain.model.capture.export import set_mode
from p2ptrain.model.capture.kept_values import KeptValues, difference
from p2ptrain.model.capture.scored_module import (
    Loss,
    call_model,
    casting,
    check_loss,
    output_leaves,
)
from p2ptrain.model.capture.trial_runs import warned_once
from p2ptrain.model.stage.random_operators import randomness_lock
from p2ptrain.model.tracing.python_state import PythonState
from p2ptrain.model.tracing.untraced_changes import HeldTensors, refuse_unready

Batch = tuple[Any, Any]

Read = Callable[[int, int], Batch]
"""(number of the batch, samples) -> its first so many samples: (input, target)."""

_NUDGE = 0.02
"""How far an update moves each number of a weight, relative to it: from -1 to 3 times half that."""

_NUDGED_ZERO = 1e-4
"""In whose place a smaller number is moved."""

_CHUNK_NUMBERS = 1 << 20


@dataclass(frozen=True, slots=True)
class ComparedBatches:
    """How many batches are compared, and with how many samples.

    Attributes:
        least: that are compared however long they take.
        most: that are compared within `seconds`.
        seconds: of the module itself. What is captured takes about as long once more.
        first_samples: of the first batch. The time that it takes decides on the others.
        most_bytes: of one batch, which is kept until what is captured has computed it.
    """

    least: int = 2
    most: int = 8
    seconds: float = 1.0
    first_samples: int = 4
    most_bytes: int = 8 * 2**20


@dataclass(frozen=True, slots=True)
class PlainStep:
    """One batch, and what the module has made of it.

    Attributes:
        gradients: of trained parameters by their first name; None = it has none.
        buffers: after it; parameters that are not trained too.
    """

    batch: Batch
    samples: int
    loss: KeptValues
    gradients: Mapping[str, KeptValues | None]
    buffers: Mapping[str, KeptValues]


@dataclass(frozen=True, slots=True)
class PlainEvaluation:
    """A batch in evaluation mode; `loss` None = the loss refuses the module's output."""

    batch: Batch
    samples: int
    loss: KeptValues | None
    outputs: tuple[KeptValues, ...]


@dataclass(slots=True)
class PlainRun:
    """What the module has computed.

    Attributes:
        failure: what it has raised then; None where nothing.
        failed: the batch where it has.
        changed: names of what it keeps in Python and has changed.
        draws: whose random numbers but torch's it has drawn.
        again: its loss where the first batch is computed once more.
        unpadded: what it makes, after `steps`, of samples without padding, among others with some.
    """

    steps: list[PlainStep] = field(default_factory=list)
    evaluation: PlainEvaluation | None = None
    failure: Exception | None = None
    failed: Batch | None = None
    changed: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()
    again: KeptValues | None = None
    unpadded: PlainStep | None = None

    @property
    def least_samples(self) -> int:
        """Of its batches."""
        pieces = [step.samples for step in self.steps]
        pieces += [] if self.evaluation is None else [self.evaluation.samples]
        pieces += [] if self.unpadded is None else [self.unpadded.samples]
        return min(pieces, default=0)


def run_plainly(
    module: nn.Module,
    loss: Loss,
    read: Read,
    read_evaluation: Read | None,
    pieces: range,
    effort: ComparedBatches,
    clock: Callable[[], float] = time.monotonic,
    *,
    autocast: torch.dtype | None = None,
    mini_batch: int = 0,
) -> PlainRun:
    """Compute some batches with `module` and `loss`; both are as they were afterwards.

    Args:
        read: the job's batches, from the first.
        read_evaluation: the same of its evaluation; None = there is none.
        pieces: samples that a micro-batch may have.
        autocast: as `capture` has it.
        mini_batch: samples of one, where a micro-batch has fewer: a part of a padded batch may have
            no padding, and libraries compute that otherwise.

    Raises:
        CaptureError: a tensor of `module` has no values yet.
    """
    refuse_unready(module)
    noted = _Noted(module, loss, autocast)
    run, begun = PlainRun(), clock()
    sizes = _Sizes(pieces, effort)
    with noted.put_back(run), warned_once():
        for number in range(effort.most):
            if number >= effort.least and clock() - begun > effort.seconds:
                break
            since = clock()
            try:
                step = _step(noted, read, sizes, number)
            except _OwnFailure as failed:
                run.failure, run.failed = failed.error, failed.batch
                break
            run.steps.append(step)
            sizes.took(step, clock() - since)
            nudge(noted.trained, number)
        if run.failure is None and mini_batch and _masks(run.steps[0].batch):
            unpadded = _without_padding(read(0, mini_batch), pieces[0])
            with suppress(Exception):  # a batch of these alone may be none
                run.unpadded = unpadded and noted.step(unpadded, pieces[0], len(run.steps))
        run.changed = noted.changed()
        if run.failure is not None:
            return run
        with suppress(Exception):  # which the capture, or the training, says
            if read_evaluation is not None:
                batch = read_evaluation(0, sizes.samples)
                run.evaluation = noted.evaluation(batch, sizes.samples)
        noted.restore_tensors()
        with suppress(Exception):
            run.again = noted.again(run.steps[0].batch)
    return run


class _OwnFailure(Exception):
    """The user's code has raised `error`."""

    def __init__(self, error: Exception, batch: Batch) -> None:
        super().__init__(str(error))
        self.error, self.batch = error, batch


def _step(noted: _Noted, read: Read, sizes: _Sizes, number: int) -> PlainStep:
    """Of a batch as few samples as wanted; of the whole micro-batch where it takes no fewer.

    Raises:
        _OwnFailure: the module or the loss does.
    """
    while True:
        samples = sizes.samples
        batch = read(number, samples)
        try:
            return noted.step(batch, samples, number)
        except Exception as error:  # whatever the user's code may raise
            if samples == sizes.whole:
                raise _OwnFailure(error, batch) from error
            sizes.refuse()


def _masks(batch: Batch) -> list[Tensor]:
    """Of its input: 1 where a sample has something, 0 where it is padded."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch[0]) if isinstance(leaf, Tensor)]
    flat = [leaf for leaf in leaves if leaf.dim() == 2 and not leaf.is_floating_point()]
    return [leaf for leaf in flat if bool(((leaf == 0) | (leaf == 1)).all())]


def _without_padding(batch: Batch, samples: int) -> Batch | None:
    """So many samples that have no padding; None where all or none are like that."""
    for mask in _masks(batch):
        full = mask.bool().all(1)
        rows = full.nonzero()[:samples, 0]
        if len(rows) == samples and not bool(full.all()):
            leaves, form = pytree.tree_flatten(batch)
            taken = [leaf[rows] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            unpadded: Batch = pytree.tree_unflatten(taken, form)
            return unpadded
    return None


class _Sizes:
    """How many samples of a batch are computed."""

    def __init__(self, pieces: range, effort: ComparedBatches) -> None:
        self._pieces, self._effort = pieces, effort
        self.samples = self._within(effort.first_samples)

    @property
    def whole(self) -> int:
        """A whole micro-batch."""
        return self._pieces[-1]

    def took(self, step: PlainStep, seconds: float) -> None:
        """Others take about as long; every other one is smaller, as a last micro-batch is."""
        leaves = [leaf for leaf in pytree.tree_leaves(step.batch) if isinstance(leaf, Tensor)]
        nbytes = sum(leaf.nbytes for leaf in leaves) / step.samples + 1
        fits = self._effort.most_bytes / nbytes
        if seconds > 0:
            fits = min(fits, step.samples * self._effort.seconds / self._effort.most / seconds)
        wanted = min(max(int(fits), self._effort.first_samples), self.whole)
        self.samples = self._within(wanted if wanted > step.samples else 3 * wanted // 4)

    def refuse(self) -> None:
        """So few samples do not work: whole micro-batches from here on."""
        self._pieces = self._pieces[-1:]
        self.samples = self.whole

    def _within(self, samples: int) -> int:
        return max(self._pieces[0], min(samples, self.whole))


class _Noted:
    """The user's module and loss, and all that they keep, as it was."""

    def __init__(self, module: nn.Module, loss: Loss, autocast: torch.dtype | None = None) -> None:
        self._module, self._loss, self._autocast = module, loss, autocast
        self._python = PythonState({"": module, "loss": loss}, code=True)
        self._held = HeldTensors(module, self._python)
        own = [*module.named_parameters(), *module.named_buffers()]
        self._before = [(tensor, tensor.detach().clone()) for _, tensor in own]
        self.trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        held = [value for *_, value in self._python.values() if isinstance(value, Tensor)]
        leaves = {id(t): t for t in (*(tensor for _, tensor in own), *held) if t.is_leaf}
        self._leaves = [(leaf, leaf.grad, leaf.requires_grad) for leaf in leaves.values()]
        values = [value for *_, value in self._python.values()]
        found = (value for value in values if isinstance(value, torch.Generator))
        self._generators = [(each, each.get_state()) for each in {id(g): g for g in found}.values()]

    @contextmanager
    def put_back(self, run: PlainRun) -> Iterator[None]:
        """On leaving, all is as it was; `run` gets to know what was not."""
        with random_numbers_kept() as drawn:
            try:
                set_mode(self._module, training=True)
                yield
            finally:
                run.draws = tuple(drawn())
                self._python.put_back()
                self.restore_tensors()
                for tensor, gradient, requires in self._leaves:
                    tensor.requires_grad_(requires)
                    tensor.grad = gradient
                for generator, state in self._generators:
                    generator.set_state(state)

    def changed(self) -> tuple[str, ...]:
        """Names of what module and loss keep in Python that is not what it was."""
        return tuple(p for p in self._python.changed() if p.split(".")[-1] != "training")

    def restore_tensors(self) -> None:
        """Parameters, buffers and what is kept beside them have their values again."""
        self._held.put_back()
        with torch.no_grad():
            for tensor, value in self._before:
                if not torch.equal(tensor, value):
                    tensor.data.copy_(value)

    def step(self, batch: Batch, samples: int, number: int) -> PlainStep:
        """Forward and backward of one batch."""
        for tensor, *_ in self._leaves:
            tensor.grad = None
        with self._seeded(number), torch.enable_grad():
            loss = self._scored(batch)
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: kept_gradient(parameter) for name, parameter in self.trained.items()}
        others = [(n, p) for n, p in self._module.named_parameters() if n not in self.trained]
        buffers = {n: KeptValues.of(t) for n, t in (*others, *self._module.named_buffers())}
        return PlainStep(batch, samples, KeptValues.of(loss), gradients, buffers)

    def evaluation(self, batch: Batch, samples: int) -> PlainEvaluation:
        """One batch in evaluation mode."""
        set_mode(self._module, training=False)
        with self._seeded(0), torch.no_grad(), casting(self._autocast):
            output = call_model(self._module, copied(batch[0]))
            outputs = tuple(KeptValues.of(leaf) for leaf in output_leaves(output)[0])
            loss = None
            with suppress(Exception):  # then it is left out
                value = self._loss(output, copied(batch[1]))
                check_loss(value)
                loss = KeptValues.of(value)
        set_mode(self._module, training=True)
        return PlainEvaluation(batch, samples, loss, outputs)

    def again(self, batch: Batch) -> KeptValues:
        """The loss of the first batch, with the weights that there were."""
        with self._seeded(0), torch.enable_grad():
            return KeptValues.of(self._scored(batch))

    def _scored(self, batch: Batch) -> Tensor:
        with casting(self._autocast):
            output = call_model(self._module, copied(batch[0]))  # which forward() may write to
            loss = self._loss(output, copied(batch[1]))
        check_loss(loss)
        return loss

    @contextmanager
    def _seeded(self, number: int) -> Iterator[None]:
        """Random numbers as what is captured will draw them, also those of generators held.

        Raises:
            SeededError: one of these is given another state by forward() or the loss.
        """
        marks = [each.manual_seed(number).get_state() for each, _ in self._generators]
        held = [each for each, _ in self._generators]
        with seeded_with(number), _DefaultGenerator(held) if held else nullcontext():
            yield
        for (each, _), mark in zip(self._generators, marks, strict=True):
            if not torch.equal(each.get_state(), mark):
                raise SeededError


class SeededError(Exception):
    """forward() or the loss seeds a generator that it keeps."""


class _DefaultGenerator(TorchFunctionMode):
    """Draws from the default generator what is asked of some, as what is captured does."""

    def __init__(self, held: Sequence[torch.Generator]) -> None:
        super().__init__()
        self._held = held

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if any(given.get("generator") is each for each in self._held):
            del given["generator"]
        return func(*args, **given)


def nudge(tensors: Mapping[str, Tensor], number: int) -> None:
    """An update of the weights that follows from their names and `number` alone.

    So two who make it have the same weights, whatever their gradients.
    """
    with torch.no_grad():
        for name, tensor in tensors.items():
            if repeats_itself(tensor):  # which the capture refuses
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(f"{number} {name}".encode()))
            for part in _chunks(tensor.detach()):
                kind = torch.float64 if part.dtype in (torch.float64, torch.complex128) else None
                noise = torch.rand(part.shape, generator=generator, dtype=kind) * 2 - 0.5
                part.add_(noise.mul_(part.abs().clamp_min_(_NUDGED_ZERO)).mul_(_NUDGE))


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    if not tensor.dim() or tensor.numel() <= _CHUNK_NUMBERS:
        return (tensor,)
    rows = max(1, _CHUNK_NUMBERS * tensor.shape[0] // tensor.numel())
    return torch.split(tensor, rows)


def kept_gradient(parameter: Tensor) -> KeptValues | None:
    """What is kept of a gradient; None where there is none."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:  # an embedding's, with sparse=True
        gradient = gradient.to_dense()
    return KeptValues.of(gradient)


@contextmanager
def left_alone(module: nn.Module, loss: Loss) -> Iterator[None]:
    """`module` in train mode; on leaving it, `loss` and random numbers are as they were."""
    with _Noted(module, loss).put_back(PlainRun()):
        yield


def changing_layer(module: nn.Module, batch: Batch) -> str | None:
    """The first layer that gives something else in a second call with the same input."""
    names = {part: name for name, part in module.named_modules()}
    calls: list[list[tuple[nn.Module, KeptOutput, KeptOutput]]] = []

    def note(part: nn.Module, given: object, made: object) -> None:
        calls[-1].append((part, _kept(given), _kept(made)))

    with left_alone(module, lambda output, _: output):
        hooks = [part.register_forward_hook(note) for part in names]
        for _ in range(2):
            calls.append([])
            with seeded_with(0), torch.no_grad(), suppress(Exception):
                call_model(module, copied(batch[0]))
        for hook in hooks:
            hook.remove()
    for (part, given, made), (other, again, made_again) in zip(*calls, strict=False):
        if part is other and _same(given, again) and not _same(made, made_again):
            name = names[part]
            return f"layer {name!r} ({type(part).__name__})" if name else "its own forward()"
    return None


KeptOutput = list[KeptValues]


def _kept(value: object) -> KeptOutput:
    leaves = pytree.tree_leaves(value)
    return [KeptValues.of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]


def _same(one: KeptOutput, other: KeptOutput) -> bool:
    return len(one) == len(other) and not any(map(partial(difference, ""), one, other))


@contextmanager
def seeded_with(number: int) -> Iterator[None]:
    """torch's own random numbers from a seed; on leaving they go on as before."""
    with randomness_lock:
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(number)
        try:
            yield
        finally:
            torch.set_rng_state(state)


def copied(value: Any) -> Any:
    """`value`, with tensors of its own."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


@contextmanager
def random_numbers_kept() -> Iterator[Callable[[], Iterator[str]]]:
    """On leaving, generators of torch, Python and NumPy are as they were.

    Gives a function that says of which of the latter two something was drawn.
    """
    numpy = sys.modules.get("numpy")
    state, own = torch.get_rng_state(), random.getstate()
    arrays = None if numpy is None else numpy.random.get_state()

    def drawn() -> Iterator[str]:
        if random.getstate() != own:
            yield "Python's random numbers"
        if numpy is not None and repr(numpy.random.get_state()) != repr(arrays):
            yield "NumPy's random numbers"

    try:
        yield drawn
    finally:
        torch.set_rng_state(state)
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(arrays)
