"""Whether what was captured computes what the user's own module does, on the job's first batches.

A trace sees a model once. State that it does not see (an iterator, a generator, an attribute of a
class, a weight's stale copy) makes the captured model another one, without a word. So before the
first step both compute the same batches, with updates between, and must give the same loss,
gradients and buffers. Parameters are shared, so neither drifts from the other.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from p2ptrain.errors import CaptureError
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.capture.export import undisturbed
from p2ptrain.model.capture.scored_module import Example, Loss, ScoredModule
from p2ptrain.model.capture.trial_runs import warned_once
from p2ptrain.model.graph.description import TensorKind
from p2ptrain.model.stage.determinism import randomness_lock
from p2ptrain.model.stage.mutated_state import written_names
from p2ptrain.model.stage.stage import Stage

_STEP = 0.01
"""Relative size of an update: what a stale copy of a weight changes is far above rounding."""

_MIN_NORM = 1e-3
"""Of a parameter that an update is relative to: those that begin with zeros move too."""

_SMALL = 1e-4
"""A gradient below this share of the largest one is measured against that share: it may be zero but
for rounding, as that of a bias in front of a normalisation."""

_UNSEEN = (
    "Something changes from call to call, or with the weights, that a trace does not see: an "
    "iterator, a generator, an attribute of a class, a file, what a library keeps. Keep it in a "
    "buffer that is written in place, self.register_buffer(name, torch.tensor(...)), or leave it "
    "out"
)


@dataclass(frozen=True, slots=True)
class RehearsalEffort:
    """How many batches are compared: at least `least`, then more up to `most` within `seconds`."""

    least: int = 2
    most: int = 8
    seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What comparing has shown.

    Attributes:
        batches: that were compared.
        inexact: the first thing that differs by no more than rounding; "" where nothing does.
        skipped: why no more was compared; "" where all was.
    """

    batches: int
    inexact: str = ""
    skipped: str = ""


def rehearse(
    module: nn.Module,
    loss: Loss,
    captured: Captured,
    batches: Iterable[tuple[Any, Any]],
    effort: RehearsalEffort,
    clock: Callable[[], float] = time.monotonic,
) -> Rehearsal:
    """Compare `captured` with `module` and `loss`; both are as they were afterwards.

    Args:
        batches: (input, target), as the job's first updates have them.

    Raises:
        CaptureError: they differ by more than other kernels may; names where.
    """
    pair = _Pair(module, loss, captured)
    begun, count, inexact = clock(), 0, ""
    with pair.put_back(), warned_once():
        for batch in batches:
            if count >= effort.most or (count >= effort.least and clock() - begun > effort.seconds):
                break
            try:
                difference = pair.compare(batch, count)
            except _OwnFailure as error:  # training says it, with the step and the unit
                return Rehearsal(count, inexact, f"the module itself fails: {error}")
            if difference is not None and not difference.is_rounding:
                if pair.draws_otherwise:
                    return Rehearsal(count, inexact, "it draws random numbers in another order")
                raise CaptureError(pair.explain(difference, batch, count))
            if difference is not None:
                inexact = inexact or difference.text
            pair.update()
            count += 1
    return Rehearsal(count, inexact)


@dataclass(frozen=True, slots=True)
class _Difference:
    """The first thing that differs."""

    text: str
    is_rounding: bool


class _OwnFailure(Exception):
    """The user's own module has failed, in plain torch."""


class _Pair:
    """The user's module and one stage that has captured all of it."""

    def __init__(self, module: nn.Module, loss: Loss, captured: Captured) -> None:
        inputs: list[Tensor] = []
        self._captured = captured
        self._scored = ScoredModule(
            module,
            loss,
            Example(captured.input, captured.target, inputs, []),
            captured.autocast,
        )
        description = captured.description
        self._own = {t.name: captured.tensor(t.name) for t in description.tensors}
        self._trainable = [t.name for t in description.tensors if t.trainable]
        written = written_names(description, 0, len(description.units))
        others = {t.name for t in description.tensors if t.kind is not TensorKind.PARAMETER}
        apart = written | others
        self._before = {
            name: tensor.detach().clone()
            for name, tensor in self._own.items()
            if name in apart or name in self._trainable
        }
        state = {
            name: self._before[name].clone() if name in apart else tensor.detach()
            for name, tensor in self._own.items()
        }
        state |= {other: state[name] for other, name in description.tied.items()}
        self._buffers = sorted(apart)
        self._stage = Stage(description, 0, len(description.units), state, copy=False)
        self.draws_otherwise = False

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """On leaving, the user's module, loss and random numbers are as they were."""
        scored = self._scored
        held = [value for *_, value in scored.held().values() if isinstance(value, Tensor)]
        leaves = {id(t): t for t in (*self._own.values(), *held) if t.is_leaf}
        gradients = [(tensor, tensor.grad) for tensor in leaves.values()]
        try:
            with undisturbed(scored, training=True):
                yield
        finally:
            scored.unseen.put_back()
            with torch.no_grad():
                for name, value in self._before.items():
                    if not torch.equal(self._own[name], value):
                        self._own[name].copy_(value)
            for tensor, gradient in gradients:
                tensor.grad = gradient

    def compare(self, batch: tuple[Any, Any], number: int) -> _Difference | None:
        """What differs first, on one batch: the loss, a gradient, a buffer."""
        with _random_numbers_kept():
            loss, draws = self._run_own(batch, number)
            theirs, theirs_draws = self._run_captured(batch, number)
        self.draws_otherwise = not torch.equal(draws, theirs_draws)
        found = _difference(f"the loss of batch {number + 1}", loss, theirs)
        if found is not None and not found.is_rounding:
            return found
        for difference in (*self._gradients(number), *self._buffers_after(number)):
            if not difference.is_rounding:
                return difference
            found = found or difference
        return found

    def update(self) -> None:
        """One step against the gradients, in size relative to each parameter."""
        stage = self._stage.state()
        with torch.no_grad():
            for name in self._trainable:
                own, theirs = self._own[name], stage.get(name, self._own[name])
                if own.grad is not None and own.grad.isfinite().all():
                    size = own.norm().clamp_min(_MIN_NORM * own.numel() ** 0.5)
                    own.sub_(own.grad * (_STEP * size / own.grad.norm().clamp_min(1e-30)))
                if own.data_ptr() != theirs.data_ptr():
                    theirs.copy_(own)
                own.grad = theirs.grad = None

    def explain(self, difference: _Difference, batch: tuple[Any, Any], number: int) -> str:
        """With the layer, where calling the module twice shows one."""
        with _random_numbers_kept():
            layer = self._changing_layer(batch, number)
        where = "" if layer is None else f"; {layer} gives something else for the same input"
        return (
            "the captured model computes something else than the module itself in plain torch: "
            f"{difference.text}{where}. {_UNSEEN}"
        )

    def _run_own(self, batch: tuple[Any, Any], number: int) -> tuple[Tensor, Tensor]:
        for name in self._trainable:
            self._own[name].grad = None
        torch.default_generator.manual_seed(number)
        try:
            with torch.enable_grad(), _DefaultGenerator():
                # of its own: a forward() may write to what it is given
                inputs = [leaf.clone() for leaf in self._captured.flatten_input(batch[0])]
                targets = [leaf.clone() for leaf in self._captured.flatten_target(batch[1])]
                loss = self._scored.plain_loss(inputs, targets)
                loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:  # whatever the user's code may raise
            raise _OwnFailure(str(error)) from error
        return loss.detach(), torch.get_rng_state()

    def _run_captured(self, batch: tuple[Any, Any], number: int) -> tuple[Tensor, Tensor]:
        torch.default_generator.manual_seed(number)
        entering = self._captured.entering(batch[0], "train")
        targets = self._captured.flatten_target(batch[1])
        try:
            (loss,) = self._stage.forward(number, entering, targets, seed=None)
            self._stage.backward(number)
        except RuntimeError as error:
            raise CaptureError(
                "the captured model fails where the module itself does not in plain torch: "
                f"{str(error).splitlines()[0]}. {_UNSEEN}"
            ) from error
        return loss, torch.get_rng_state()

    def _gradients(self, number: int) -> Iterator[_Difference]:
        stage = self._stage.state()
        for tensor in (*stage.values(), *(self._own[name] for name in self._trainable)):
            if tensor.grad is not None and tensor.grad.layout is not torch.strided:
                tensor.grad = tensor.grad.to_dense()  # an embedding's, with sparse=True
        own = {name: self._own[name].grad for name in self._trainable}
        norms = [float(g.abs().max()) for g in own.values() if g is not None and g.numel()]
        floor = _SMALL * max(norms, default=0.0)
        for name, gradient in own.items():
            what = f"the gradient of {name!r} in batch {number + 1}"
            theirs = stage[name].grad if name in stage else None
            if gradient is None or theirs is None:
                if gradient is not theirs:
                    yield _Difference(
                        f"{what} is {_there(gradient)}, captured {_there(theirs)}", False
                    )
                continue
            found = _difference(what, gradient, theirs, floor)
            if found is not None:
                yield found

    def _buffers_after(self, number: int) -> Iterator[_Difference]:
        stage, now = self._stage.state(), dict(self._scored.module.named_buffers())
        for name in self._buffers:
            if name in stage:
                own = now.get(name, self._own[name])
                found = _difference(
                    f"the buffer {name!r} after batch {number + 1}", own, stage[name]
                )
                if found is not None:
                    yield found

    def _changing_layer(self, batch: tuple[Any, Any], number: int) -> str | None:
        """The first layer that gives something else in a second call with the same input."""
        names = {part: name for name, part in self._scored.module.named_modules()}
        calls: list[list[tuple[nn.Module, Sequence[Tensor], Sequence[Tensor]]]] = []

        def note(part: nn.Module, given: object, made: object) -> None:
            calls[-1].append((part, _copies(given), _copies(made)))

        hooks = [part.register_forward_hook(note) for part in names]
        try:
            for _ in range(2):
                calls.append([])
                torch.default_generator.manual_seed(number)
                with torch.no_grad(), _DefaultGenerator(), suppress(Exception):
                    self._scored.run(self._captured.flatten_input(batch[0]))
        finally:
            for hook in hooks:
                hook.remove()
        for (part, given, made), (other, again, made_again) in zip(*calls, strict=False):
            if part is other and _equal(given, again) and not _equal(made, made_again):
                name = names[part]
                return f"layer {name!r} ({type(part).__name__})" if name else "its own forward()"
        return None


def _difference(what: str, own: Tensor, theirs: Tensor, floor: float = 0.0) -> _Difference | None:
    if own.shape != theirs.shape or own.dtype is not theirs.dtype:
        shapes = f"{list(own.shape)} {own.dtype}, captured {list(theirs.shape)} {theirs.dtype}"
        return _Difference(f"{what} is {shapes}", is_rounding=False)
    one, other = own.detach(), theirs.detach()
    if torch.equal(one, other) or not one.numel():
        return None
    unequal = ~torch.isclose(one, other, rtol=0, atol=0, equal_nan=True)
    if not unequal.any():
        return None
    first = tuple(int(k) for k in unequal.nonzero()[0])
    text = f"{what} is {_number(one[first])}, captured {_number(other[first])}"
    if first:
        text = (
            f"{what} (at {list(first)}) is {_number(one[first])}, captured {_number(other[first])}"
        )
    if not one.is_floating_point() and not one.is_complex():
        return _Difference(text, is_rounding=False)
    scale = max(float(one.abs().nan_to_num().max()), floor)
    rounding = scale * float(torch.finfo(one.dtype).eps) ** 0.5
    apart = (one - other)[unequal].abs()
    return _Difference(text, is_rounding=bool((apart <= rounding).all()))


def _number(value: Tensor) -> str:
    return f"{value.item():.7g}" if value.is_floating_point() else str(value.item())


def _there(gradient: Tensor | None) -> str:
    return "not there" if gradient is None else "there"


def _copies(value: object) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all()
        for a, b in zip(one, other, strict=True)
    )


class _DefaultGenerator(TorchFunctionMode):
    """Draws from the default generator whatever a model draws from, as the captured one does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: Mapping[str, Any] = kwargs or {}
        if isinstance(given.get("generator"), torch.Generator):
            given = {name: value for name, value in given.items() if name != "generator"}
        return func(*args, **given)


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Generators of torch, Python and NumPy go on as if nothing had been drawn."""
    numpy = sys.modules.get("numpy")
    with randomness_lock:
        states = torch.get_rng_state(), random.getstate()
        arrays = None if numpy is None else numpy.random.get_state()
        try:
            yield
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            if numpy is not None:
                numpy.random.set_state(arrays)
