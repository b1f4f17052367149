"""Runs of a model with other numbers of samples, to find out why torch.export refuses it.

Most tensors have shapes and no content, so that a run costs little. In one run the batch size is a
symbol, as in torch.export: what the model asks of it shows where it depends on it.

While a model is traced, torch's own messages are silenced in the thread that traces, since they are
about its internals. Warnings of the user's module appear once, when it runs by
itself (`plain_run`).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from types import FrameType
from typing import Any, TextIO

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import _trace
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from p2ptrain.model.tracing.trace_patches import replaced_in_this_thread

Run = Callable[[list[Tensor], list[Tensor]], object]

_DIVISORS = (2, 3, 4, 5, 6, 8)

_ODD = (11, 13)

_MANY = 211


def resized(leaves: Sequence[Tensor], size: int) -> list[Tensor]:
    """The leaves with `size` samples: theirs, repeated or cut off."""
    return [leaf[torch.arange(size) % leaf.shape[0]] for leaf in leaves]


@dataclass(frozen=True, slots=True)
class BatchSizeRead:
    """Where the size of a batch is asked for.

    Attributes:
        stack: of what the run calls, outermost frame first.
        module: the innermost that runs there.
    """

    stack: traceback.StackSummary
    module: nn.Module | None


class TrialRuns:
    """Of one model and loss, with one example."""

    def __init__(self, run: Run, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """`run` leaves the model as it was."""
        self._run = run
        self._inputs, self._targets = inputs, targets

    def failure(self, samples: int) -> Exception | None:
        """What so many samples raise; None where they do not."""
        return self._raised(samples, FakeTensorMode(allow_non_fake_inputs=True))

    def in_plain_torch(self) -> Exception | None:
        """What the samples raise with the numbers that they have, however many; None if not."""
        error = self.failure(_MANY)
        for samples in (self._inputs[0].shape[0], _ODD[0]):
            if error is None:
                break
            error = self._raised(samples, contextlib.nullcontext())
        return error

    def _raised(
        self, samples: int, mode: contextlib.AbstractContextManager[object]
    ) -> Exception | None:
        try:
            with silence_torch_logs(), mode:
                self._run(resized(self._inputs, samples), resized(self._targets, samples))
        except Exception as error:  # whatever the user's code raises: it is looked at
            return error
        return None

    def divisor(self) -> int | None:
        """What must divide the number of samples; None where nothing need, or none is found."""
        if any(self.failure(samples) is None for samples in _ODD):
            return None
        return next((divisor for divisor in _DIVISORS if self._needs(divisor)), None)

    def _needs(self, divisor: int) -> bool:
        multiples = [odd * divisor for odd in _ODD]
        return all(self.failure(n) is None for n in multiples) and all(
            self.failure(n + 1) is not None for n in multiples
        )

    def asking(self, *, fixes: bool) -> BatchSizeRead | None:
        """Where the batch's size is first asked for; None where it is not, or cannot be.

        Args:
            fixes: so that it has to be one number; else so that some numbers differ from others.
        """
        environment = _Watching(_is_equality if fixes else _differs)
        mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
        inputs = [_of_any_size(mode, leaf) for leaf in self._inputs]
        targets = [_of_any_size(mode, leaf) for leaf in self._targets]
        with silence_torch_logs(), mode, suppress(Exception):  # what it asked before counts
            self._run(inputs, targets)
        return environment.found


def _of_any_size(mode: FakeTensorMode, leaf: Tensor) -> Tensor:
    sizes = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (leaf.dim() - 1)
    (batch,) = resized([leaf], _ODD[0])
    return mode.from_tensor(batch, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def _is_equality(expression: sympy.Expr) -> bool:
    return isinstance(expression, sympy.Eq)


def _differs(expression: sympy.Expr) -> bool:
    """Between small numbers of samples: whether tensors are too large does not count."""
    (symbol,) = expression.free_symbols
    return any(expression.subs(symbol, number) == sympy.false for number in range(2, _ODD[0]))


class _Watching(ShapeEnv):
    """Finds the first guard on one size alone that is of a kind."""

    def __init__(self, kind: Callable[[sympy.Expr], bool]) -> None:
        super().__init__()
        self.found: BatchSizeRead | None = None
        self._kind = kind

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """As it is, and looks whether that made such a guard."""
        before = len(self.guards)
        value = super().evaluate_expr(*args, **kwargs)
        added = [g.expr for g in self.guards[before:] if len(g.expr.free_symbols) == 1]
        if self.found is None and any(map(self._kind, added)):
            self.found = _asking(sys._getframe(1))
        return value


def _asking(frame: FrameType | None) -> BatchSizeRead:
    entered = TrialRuns.asking.__code__
    below = [*takewhile(lambda at: at[0].f_code is not entered, traceback.walk_stack(frame))]
    selves = (at.f_locals.get("self") for at, _ in below)
    module = next((one for one in selves if isinstance(one, nn.Module)), None)
    return BatchSizeRead(traceback.StackSummary.extract(reversed(below)), module)


Show = Callable[[Warning | str, type[Warning], str, int, TextIO | None, str | None], None]


@contextlib.contextmanager
def silence_torch_logs() -> Iterator[None]:
    """Meanwhile no logger of torch says anything in this thread, and nothing warns in it."""
    thread = threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [logging.getLogger(name) for name in logging.Logger.manager.loggerDict]
    handlers = [h for one in loggers if one.name.split(".")[0] == "torch" for h in one.handlers]
    for handler in handlers:
        handler.addFilter(is_of_others)
    try:
        with _shown_by(lambda *_: None), replaced_in_this_thread(_trace, "print", _not_printed):
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_of_others)


@contextlib.contextmanager
def warned_once() -> Iterator[None]:
    """Meanwhile this thread's warnings are shown once each, also those that a trace has met."""
    said: set[tuple[str, str, int]] = set()
    always, show = torch.is_warn_always_enabled(), warnings.showwarning

    def show_once(message: Any, kind: Any, filename: str, line: int, *rest: Any) -> None:
        if (str(message), filename, line) not in said:
            said.add((str(message), filename, line))
            show(message, kind, filename, line, *rest)

    with warnings.catch_warnings():  # what was met while nothing was shown counts as shown
        pass
    torch.set_warn_always(True)
    try:
        with _shown_by(show_once):
            yield
    finally:
        torch.set_warn_always(always)


def _shown_by(function: Show) -> contextlib.AbstractContextManager[None]:
    """Warnings of this thread, as far as filters let them through."""
    return replaced_in_this_thread(warnings, "showwarning", function)


def _not_printed(*_: Any, **__: Any) -> None:
    """Where it fails torch.export prints the half-made graph."""
