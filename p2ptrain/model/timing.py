"""How long each unit takes on this device, from a few passes within a budget of time.

A device may have a fifth of a core, handed out in slices of ten milliseconds: the wall time of one
operator is then either its CPU time or ten milliseconds more, by chance. So units are compared by
the CPU time of the computing thread, medians of several passes, and all are scaled by one factor,
wall over CPU time of everything that was run. On a machine of its own that factor is near 1.

Where a device cannot hold the whole model, each unit runs by itself, forward and backward.

Passes with the backward in two parts take turns with whole ones: the first say which part of it the
gradients of weights are, the others how long it takes. A split pass counts for both where there is
time for one pass only; the few microseconds that splitting costs are then nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

MAXIMUM_PASSES = 9
"""More make the medians no better."""


class UnitRunner(Protocol):
    """A model cut into its units, run one at a time with real values flowing between them."""

    @property
    def unit_count(self) -> int:
        """How many units."""

    def begin(self, batch: int, *, split: bool, apart: bool) -> None:
        """Make inputs and targets for `batch` samples; forwards in order, then backwards follow.

        Args:
            batch: number of samples.
            split: the backwards will come in two parts.
            apart: each unit's backward will follow its forward at once, from made-up gradients.
        """

    def prepare(self, unit: int) -> None:
        """Make that unit ready for its forward; this is not timed."""

    def forward(self, unit: int) -> None:
        """Run one unit's forward."""

    def backward(self, unit: int) -> None:
        """Run one unit's backward."""

    def backward_inputs(self, unit: int) -> None:
        """Run the part of one unit's backward that gives the gradients of its inputs."""

    def backward_weights(self, unit: int) -> None:
        """Run what is left of that unit's backward."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds, both monotonic: `wall` of the world, `cpu` used by the calling thread."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.thread_time


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Seconds of each unit for one batch size.

    Attributes:
        weight: the part of `backward` that gradients of weights take.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Pass:
    """CPU seconds of each unit in one pass; wall and CPU seconds of all units together.

    Attributes:
        weight: part of `backward`; None where the backwards were whole.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...] | None
    wall: float

    @property
    def cpu(self) -> float:
        return sum(self.forward) + sum(self.backward)


def time_units(
    runner: UnitRunner,
    batch_sizes: Sequence[int],
    budget_seconds: float,
    *,
    most_seconds: float = 0.0,
    clock: Clock | None = None,
    may_run: Callable[[int], bool] = lambda batch: True,
    apart: Callable[[int], bool] = lambda batch: False,
) -> dict[int, UnitTimes]:
    """Time every unit for each batch size, ascending, as far as the budget goes.

    The smallest size is always measured: one pass to warm up, at least one that counts. A larger
    one is left out, with all above it, when two passes of it are expected to exceed the budget, or
    where `may_run` forbids it; the time goes to more passes of the one before.

    Args:
        budget_seconds: for all sizes, with passes repeated where there is time.
        most_seconds: a slow device may take so long instead, for sizes that it runs twice only:
            planners must know how much cheaper a sample is in a large batch.
        apart: asked before each pass: whether one unit after the other runs alone.
    """
    clock = clock or Clock()
    course = _Course(runner, clock, apart)
    started = clock.wall()
    deadline = started + budget_seconds
    latest = started + max(budget_seconds, most_seconds)
    sizes = sorted(set(batch_sizes))
    passes: dict[int, list[_Pass]] = {}
    for place, batch in enumerate(sizes):
        left = deadline - clock.wall()
        allowed = latest - clock.wall()
        if place and not (_fits(batch, passes, allowed) and may_run(batch)):
            course.repeat(sizes[place - 1], passes[sizes[place - 1]], deadline)
            break
        course.one_pass(batch, split=True)
        passes[batch] = [course.one_pass(batch, split=True)]
        share = left / (len(sizes) - place)
        course.repeat(batch, passes[batch], deadline - left + share)
    return _scaled(passes)


def _fits(batch: int, passes: dict[int, list[_Pass]], left: float) -> bool:
    """Whether a warm-up and one pass of `batch` samples are expected to fit into `left` seconds.

    By the line through the last two sizes. By the last one alone a slow device would not come to
    the sizes that it should train with, as most of a small pass does not depend on its size.
    """
    largest = max(passes)
    walls = {size: statistics.median(one.wall for one in done) for size, done in passes.items()}
    a_sample = walls[largest] / largest
    if len(passes) > 1:
        before = sorted(passes)[-2]
        slope = (walls[largest] - walls[before]) / (largest - before)
        a_sample = min(max(slope, 0.0), a_sample)
    return 2 * (walls[largest] + a_sample * (batch - largest)) <= left


class _Course:
    """Passes over the units of a runner, timed."""

    def __init__(self, runner: UnitRunner, clock: Clock, apart: Callable[[int], bool]) -> None:
        self._runner = runner
        self._clock = clock
        self._apart = apart
        self._wall = 0.0

    def repeat(self, batch: int, done: list[_Pass], until: float) -> None:
        """Add passes to `done` while the next is expected to end before `until`."""
        while len(done) < MAXIMUM_PASSES and self._clock.wall() + done[-1].wall <= until:
            done.append(self.one_pass(batch, split=len(done) % 2 == 0))

    def one_pass(self, batch: int, *, split: bool) -> _Pass:
        """All units forward, then all backward; or each by itself."""
        units, self._wall = range(self._runner.unit_count), 0.0
        apart = self._apart(batch)
        self._runner.begin(batch, split=split, apart=apart)
        forward, backward = [], []
        for unit in units:
            forward.append(self._forward(unit))
            if apart:
                backward.append(self._backward(unit, split))
        if not apart:
            backward = [self._backward(unit, split) for unit in reversed(units)][::-1]
        return _Pass(
            forward=tuple(forward),
            backward=tuple(inputs + weight for inputs, weight in backward),
            weight=tuple(weight for _, weight in backward) if split else None,
            wall=self._wall,
        )

    def _forward(self, unit: int) -> float:
        self._runner.prepare(unit)
        return self._timed(self._runner.forward, unit)

    def _backward(self, unit: int, split: bool) -> tuple[float, float]:
        """(inputs, weights), or all of it and nothing."""
        if not split:
            return self._timed(self._runner.backward, unit), 0.0
        inputs = self._timed(self._runner.backward_inputs, unit)
        return inputs, self._timed(self._runner.backward_weights, unit)

    def _timed(self, run: Callable[[int], None], unit: int) -> float:
        wall, cpu = self._clock.wall(), self._clock.cpu()
        run(unit)
        cpu = self._clock.cpu() - cpu
        self._wall += self._clock.wall() - wall
        return cpu


def _scaled(passes: dict[int, list[_Pass]]) -> dict[int, UnitTimes]:
    """Median CPU times, times wall over CPU of all passes: what the device gives us of itself."""
    everything = [one for done in passes.values() for one in done]
    cpu = sum(one.cpu for one in everything)
    factor = max(1.0, sum(one.wall for one in everything) / cpu) if cpu > 0 else 1.0
    return {batch: _unit_times(done, factor) for batch, done in passes.items()}


def _unit_times(done: list[_Pass], factor: float) -> UnitTimes:
    whole = [one for one in done if one.weight is None] or done
    backward = _medians([one.backward for one in whole], factor)
    parts = [_shares(one.weight, one.backward) for one in done if one.weight is not None]
    return UnitTimes(
        forward=_medians([one.forward for one in whole], factor),
        backward=backward,
        weight=tuple(
            share * seconds for share, seconds in zip(_medians(parts, 1.0), backward, strict=True)
        ),
    )


def _shares(parts: tuple[float, ...], wholes: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(
        min(1.0, part / whole) if whole > 0 else 0.0
        for part, whole in zip(parts, wholes, strict=True)
    )


def _medians(rows: list[tuple[float, ...]], factor: float) -> tuple[float, ...]:
    return tuple(factor * statistics.median(column) for column in zip(*rows, strict=True))
