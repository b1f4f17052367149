"""Copies between the host and a twin that take time, and watch what is done to them meanwhile.

The twin's operators have done their work when they return; its copies have not. A copy is due some
ticks after it was asked for: a tick is an operator of the twin, or a turn of the event loop that
waits for copies. So no time passes but by what a test does.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of one allocation of the twin, from the first to the last that a tensor has."""

    memory: object
    first: int
    end: int

    def meets(self, other: Span) -> bool:
        """Whether they share bytes."""
        is_same = self.memory is other.memory
        return is_same and self.first < other.end and other.first < self.end


@dataclass(eq=False, slots=True)
class CopyIn:
    """Attributes:
    source: in host memory; nobody may write to it before the copy is due.
    seen: what it was.
    target: the twin's, NaN until it is filled.
    """

    source: Tensor
    seen: Tensor
    target: Tensor
    due: int
    is_filled: bool = False

    def fill(self) -> None:
        """As far as the twin's operators are concerned, it has run."""
        if not self.is_filled:
            self.target.copy_(self.seen)
            self.is_filled = True


@dataclass(eq=False, slots=True)
class CopyOut:
    """Attributes:
    span: of the source, which must not change before the copy has run.
    written: the twin's operators wait for it before they change the source.
    keep: what keeps the source's memory.
    """

    source: Tensor
    span: Span
    target: Tensor
    written: bool
    due: int
    keep: object
    is_spoilt: bool = False
    is_done: bool = False


@dataclass(slots=True)
class Copies:
    """Two queues, each in its order; of copies that are due in both, any may be first.

    Attributes:
        most_ticks: that a copy takes after the one before.
        misuses: what was done to tensors that were being copied.
        on_tick: called with the number of ticks when time passes.
    """

    seed: int
    most_ticks: int
    misuses: list[str] = field(default_factory=list)
    now: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)
    _in: deque[CopyIn] = field(default_factory=deque)
    _out: deque[CopyOut] = field(default_factory=deque)
    _drawn: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._drawn = random.Random(self.seed)

    def tick(self) -> None:
        """One passes; what is due by then runs."""
        with self.lock:
            self.now += 1
            while due := self._due():
                self._drawn.choice(due)()

    def _due(self) -> list[Callable[[], None]]:
        due: list[Callable[[], None]] = []
        if self._in and self._in[0].due <= self.now:
            due.append(self._next_in)
        if self._out and self._out[0].due <= self.now:
            due.append(self._next_out)
        return due

    def copy_in(self, source: Tensor, target: Tensor) -> None:
        """Begin one; the target holds no numbers before it has run."""
        poison(target)
        with self.lock:
            last = self._in[-1].due if self._in else self.now
            due = max(last, self.now) + self._drawn.randint(0, self.most_ticks)
            self._in.append(CopyIn(source, source.clone(), target, due))

    def copy_out(
        self, source: Tensor, span: Span, target: Tensor, *, written: bool, keep: object
    ) -> CopyOut:
        """Begin one; the target holds no numbers before it has run.

        It runs behind all copies in that were asked for before, so it may fill what they read.
        """
        with self.lock:
            while any(_share(copy.source, target) for copy in self._in):
                self._next_in()
            poison(target)
            last = self._out[-1].due if self._out else self.now
            due = max(last, self.now) + self._drawn.randint(0, self.most_ticks)
            copy = CopyOut(source, span, target, written, due, keep)
            self._out.append(copy)
        return copy

    def fill(self) -> None:
        """An operator of the twin waits for the copies in that were asked for before it."""
        with self.lock:
            for copy in self._in:
                copy.fill()

    def changing(self, span: Span) -> None:
        """An operator of the twin writes there."""
        with self.lock:
            for copy in list(self._out):
                if copy.is_done or not copy.span.meets(span):
                    continue
                if copy.written:
                    self.run(copy)
                elif not copy.is_spoilt:
                    copy.is_spoilt = True
                    shape = tuple(copy.source.shape)
                    self.misuses.append(f"a tensor {shape} changed while it was copied out")

    def run(self, copy: CopyOut) -> None:
        """Let time pass until that one has run."""
        with self.lock:
            while not copy.is_done:
                self.now = max(self.now, self._out[0].due)
                self._next_out()

    def run_all(self) -> None:
        """Let time pass until all have run."""
        with self.lock:
            while self._in:
                self._next_in()
            while self._out:
                self._next_out()

    @property
    def pending(self) -> int:
        """How many have not run."""
        return len(self._in) + len(self._out)

    def _next_in(self) -> None:
        copy = self._in.popleft()
        copy.fill()
        if not same_bits(copy.source, copy.seen):
            shape = tuple(copy.source.shape)
            self.misuses.append(f"a host tensor {shape} changed before the twin had read it")

    def _next_out(self) -> None:
        copy = self._out.popleft()
        if not is_poison(copy.target):
            shape = tuple(copy.target.shape)
            self.misuses.append(f"a host tensor {shape} was written to before its copy arrived")
        if not copy.is_spoilt:
            copy.target.copy_(copy.source)
        copy.is_done = True
        copy.keep = None


def _share(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def poison(tensor: Tensor) -> None:
    """Numbers that nobody takes for right: NaN, -1, True."""
    tensor.fill_(_poison(tensor.dtype))


def is_poison(tensor: Tensor) -> bool:
    """Whether every element is."""
    return bool(tensor.isnan().all() if _has_nan(tensor.dtype) else (tensor == -1).all()) or (
        tensor.dtype in (torch.bool, torch.uint8) and bool((tensor == _poison(tensor.dtype)).all())
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Where NaN equals NaN."""
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _has_nan(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _poison(dtype: torch.dtype) -> float | int | bool:
    if _has_nan(dtype):
        return float("nan")
    return {torch.bool: True, torch.uint8: 255}.get(dtype, -1)
