"""How long each unit takes on this device, from a few passes within a budget of time.

A device may have a fifth of a core, in slices of ten milliseconds: wall time depends on where the
slices fall. So passes are compared by the CPU time of the computing thread, medians of several, and
all are scaled by one factor, wall over CPU time (`process/cpu_share.py`).

The whole model is run as one stage, as in training; passes unit by unit only divide its time, since
each unit alone begins and ends a graph of autograd's. Split passes have the backward in two parts
and say which part weight gradients are.

    smallest size    split, whole, then units, whole, ... as there is time
    the next         (units), split, whole
    larger ones      (units), units, whole       a pass in parentheses warms up and does not count

One size does not say what another takes: reading weights and writing their gradients cost the same
for any. So a slow device runs a second size at least once, as a whole, and leaves out what else it
would run of the smallest; or it takes the largest second (several devices of one kind do both).
When two sizes are warm and near enough to those that plans use, it ends early. Then it computes on
until all have measured: in training all do. The figures behind this: docs/decisions/007.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from p2ptrain.process.cpu_share import CpuSpan, wall_by_cpu
from p2ptrain.profiling.unit_chain import UnitChain
from p2ptrain.profiling.unit_passes import (
    BatchPasses,
    CpuClock,
    TimingLimits,
    UnitPass,
    UnitTimings,
    WholePass,
    informative_passes,
    unit_times,
)

MAXIMUM_PASSES = 9
"""Of one size. More make the medians no better."""

IN_TWO_PARTS = 2
"""Sizes at which backwards are split."""

ROOM_FOR_SMALLEST = 0.6
"""Of the time for all, what the smallest size may take to show how it divides among the units."""

ROOM_FOR_LARGER = 0.6
"""Of the time left, what a larger size may take that is not the last."""

MIN_SLOPE = 0.6
"""Of a sample's cost in the largest size so far, what a further one is expected to cost at least:
two small sizes may happen to have taken the same time."""

SECOND_SIZE = 1.3
"""Of the time for all, until when a second size may be expected to end where there is only one."""

SLOPE_OF_ONE_SIZE = 0.8
"""Of a sample's cost in the smallest size, what a further one is expected to cost where no other
size has shown it."""

NEAR_THE_LARGEST = 4
"""Where the largest size comes second, how many times smaller one may be that is run warm in place
of it: what lies above follows from a line."""

SPLIT_BY_WHOLE = 1.25
"""How many times as long as a whole pass the first, split one takes at least."""

MANY_UNITS = 6
"""Among so many one more costs little: from here on the first is run before they are timed."""

CHEAPER = 0.6
"""Of a sample's cost below it, what one is expected to cost from the size on that torch computes by
another library (`measure_units.py`): MobileNetV2 0.5, ResNet-50 0.49, EfficientNet-B1 0.5 from 4 to
16 samples."""

FIRST_PASS = 1.5
"""How many times as long as the next one the first pass of a size takes, about."""

MIN_GROWTH = 1.5
"""From one size to the next, where time forces a smaller step than was asked for."""

SETTLED = 1.05
"""A pass that took at most so many times as long as the shortest of those before has settled."""

SETTLED_PASSES = 3
"""One after the other."""


@dataclass(frozen=True, slots=True)
class _PassPlan:
    """How a size is measured, besides the smallest, in this order.

    Attributes:
        first: passes by units before those that count.
        split: passes by units, with backwards in two parts.
        units: passes by units.
        whole: passes of the model as one stage.
        cost: seconds of all and of getting ready, by those of a whole pass that is warm.
    """

    first: int
    split: int
    units: int
    whole: int
    cost: float


_SPLIT, _UNITS, _SHORT = (
    _PassPlan(1, 1, 0, 1, 4.3),
    _PassPlan(1, 0, 1, 1, 3.5),
    _PassPlan(1, 0, 1, 0, 2.5),
)

_APART = _PassPlan(0, 2, 0, 0, 3.0)

_ONCE, _THIRD_ONCE = _PassPlan(0, 0, 0, 1, 1.2), _PassPlan(0, 0, 0, 1, 1.5)


def time_units(
    runner: UnitChain,
    batch_sizes: Sequence[int],
    limits: TimingLimits,
    clock: CpuClock | None = None,
) -> UnitTimings:
    """Time every unit for each batch size, ascending, as far as the limits go.

    The smallest size is always measured. For a larger one that is expected to take too long, or
    that `may_run` forbids, a smaller one is taken that is still well above the one before; where
    there is none, or no other may be taken, the series ends.
    """
    course = _TimingRun(runner, clock or CpuClock(), limits)
    sizes = sorted(set(batch_sizes))
    course.settle(sizes[0])
    course.measure_smallest(sizes, limits.budget_seconds / len(sizes))
    larger = sizes[1:]
    if limits.largest_second:
        larger = [*larger[-1:], *larger[:-1]]
    for place, wanted in enumerate(larger):
        left = len(larger) - place
        if wanted < course.largest:
            course.measure_between(wanted)
        elif not course.measure_larger(wanted, last=wanted == sizes[-1]):
            break
        course.repeat(course.latest, course.left_seconds() / left)
    course.repeat(course.latest, course.left_seconds())
    course.run_again()
    course.fill()
    found = [course.done[batch] for batch in sorted(course.done)]
    factor = 1.0 if course.clock.is_one else wall_by_cpu(course.spans)
    passes = informative_passes(found)
    cold = tuple(found.batch for found in passes if found.is_cold)
    return UnitTimings(unit_times(passes, factor), factor, cold)


@dataclass(slots=True)
class _TimingRun:
    """Passes over the units of a runner, timed.

    Attributes:
        done: by batch size, in the order in which they were measured.
        spans: of all passes.
    """

    runner: UnitChain
    clock: CpuClock
    limits: TimingLimits
    done: dict[int, BatchPasses] = field(default_factory=dict)
    spans: list[CpuSpan] = field(default_factory=list)
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock.wall()

    @property
    def largest(self) -> int:
        """The largest size measured."""
        return max(self.done)

    @property
    def latest(self) -> int:
        """The size measured last."""
        return next(reversed(self.done))

    def left_seconds(self) -> float:
        """Of the budget."""
        return self._started + self.limits.budget_seconds - self.clock.wall()

    def _allowed_seconds(self) -> float:
        """Until no larger size may go on."""
        return self._started + self._most_seconds - self.clock.wall()

    def _enough_seconds(self) -> float:
        """Until what is not needed ends."""
        enough = max(self.limits.budget_seconds, self.limits.enough_seconds)
        return self._started + min(self._most_seconds, enough) - self.clock.wall()

    @property
    def _most_seconds(self) -> float:
        return max(self.limits.budget_seconds, self.limits.most_seconds)

    # -- sizes -----------------------------------------------------------------------------------

    def settle(self, batch: int) -> None:
        """Run the first unit until that takes equally long, for a moment; then time begins."""
        until, shortest, settled = self._started + self.limits.settle_seconds, inf, 0
        while settled < SETTLED_PASSES and (before := self.clock.wall()) < until:
            self.runner.warm_up(batch, split=False)
            seconds = self.clock.wall() - before
            settled = settled + 1 if seconds <= SETTLED * shortest else 0
            shortest = min(shortest, seconds)
        self._started = self.clock.wall()

    def measure_smallest(self, sizes: Sequence[int], repeat_seconds: float) -> None:
        """What shows its time; how it divides, if that is quick; more in `repeat_seconds`."""
        batch = sizes[0]
        found = self.done[batch] = BatchPasses(batch)
        until = self.clock.wall() + repeat_seconds
        for_larger = (1 - ROOM_FOR_SMALLEST) * self._allowed_seconds()
        found.split.append(self._units(batch, split=True))
        if self.limits.apart(batch):
            self._another(found)
        elif not self._crowds_out_a_second(sizes):
            found.whole.append(self._whole(batch))
            if self._allowed_seconds() - found.longest >= for_larger:
                found.units.append(self._units(batch, split=False))
            if self._allowed_seconds() - found.wall >= for_larger:
                found.whole.append(self._whole(batch))
        self.repeat(batch, until - self.clock.wall())

    def _crowds_out_a_second(self, sizes: Sequence[int]) -> bool:
        """Whether there is time for a second size, but not after another pass of the smallest."""
        larger = [size for size in sizes[1:2] if self.limits.may_run(size)]
        if not larger:
            return False
        wanted = _ONCE.cost * self._seconds(min(larger[0], 2 * sizes[0]))
        late = self._late_seconds()
        return late - self._seconds(sizes[0]) < wanted <= late

    def _late_seconds(self) -> float:
        """Until when a second size may be expected to end where there is only one."""
        return self._allowed_seconds() + (SECOND_SIZE - 1) * self.limits.most_seconds

    def measure_larger(self, wanted: int, *, last: bool) -> bool:
        """Measure `wanted`, or as near to it as time and memory allow; False if not at all."""
        is_second = len(self.done) == 1
        part = 1.0 if last else ROOM_FOR_LARGER
        enough, allowed = part * self._enough_seconds(), part * self._allowed_seconds()
        late = self._late_seconds() if is_second else enough
        asked = [wanted] if self.limits.every_size else self._towards(wanted)
        sizes = [size for size in asked if self.limits.may_run(size)]
        gained = [size for size in sizes if self._crosses(size)]
        near = [size for size in gained or sizes if 2 * size >= wanted]
        as_near = near
        if self.limits.largest_second:
            as_near = [s for s in gained or sizes if NEAR_THE_LARGEST * s >= wanted]
        choices = [(self._best, size, enough) for size in near]
        if is_second and enough < allowed:
            choices += [(_SHORT, size, enough) for size in near]
        choices += [(_SHORT, size, late) for size in as_near]
        once = _ONCE if is_second else _THIRD_ONCE
        # the least of those that have gained leaves time for a second pass, which it takes
        choices += [(once, size, late) for size in sizes if size not in gained[:-1]]
        apart = [size for size in sizes if self.limits.apart(size)]
        choices = [(_APART, size, allowed) for size in apart] + [
            (way, size, seconds) for way, size, seconds in choices if size not in apart
        ]
        if self.limits.every_size:
            choices[-1:] = [(way, size, inf) for way, size, _ in choices[-1:]]
        for way, size, seconds in choices:
            if way.cost * self._seconds(size) <= seconds:
                return self._is_measured(size, way)
        return False

    def _is_measured(self, size: int, way: _PassPlan) -> bool:
        """Measure it; False: there is too little memory for it."""
        try:
            self._measure(size, way)
        except Exception as error:
            if not self.limits.is_too_large(error):
                raise
        else:
            return True
        del self.done[size]
        self.runner.forget()
        return False

    def measure_between(self, batch: int) -> None:
        """Measure a size between others, where there is memory and time for what counts of it."""
        if not self.limits.may_run(batch) or self.limits.apart(batch) or batch in self.done:
            return
        for way in (self._best, _SHORT):
            if way.cost * self._seconds(batch) <= self._enough_seconds():
                self._measure(batch, way)
                return

    @property
    def _best(self) -> _PassPlan:
        return _SPLIT if len(self.done) < IN_TWO_PARTS else _UNITS

    def _measure(self, batch: int, way: _PassPlan) -> None:
        found = self.done[batch] = BatchPasses(batch, is_ready=way.first > 0)
        for _ in range(way.first):
            self._units(batch, split=False)
        found.split += [self._units(batch, split=True) for _ in range(way.split)]
        found.units += [self._units(batch, split=False) for _ in range(way.units)]
        found.whole += [self._whole(batch) for _ in range(way.whole)]

    def _seconds(self, batch: int) -> float:
        """That a whole pass is expected to take, by the line through the last two sizes.

        In proportion to the last one a slow device would not come to the sizes that it should train
        with, as most of a small pass does not depend on its size.
        """
        largest = self.done[self.largest]
        if len(self.done) == 1:
            known = largest.wall / (1 if largest.whole or largest.units else SPLIT_BY_WHOLE)
            grown = known * (1 + SLOPE_OF_ONE_SIZE * (batch / self.largest - 1))
            return CHEAPER * grown if self._crosses(batch) else grown
        a_sample = largest.wall / self.largest
        before = sorted(self.done)[-2]
        change = self.limits.cheaper_from
        if self._crosses(batch):
            return CHEAPER * (largest.wall + a_sample * (batch - self.largest))
        if change is not None and before < change <= self.largest:
            return a_sample * batch
        slope = (largest.wall - self.done[before].wall) / (self.largest - before)
        a_sample = min(max(slope, MIN_SLOPE * a_sample), a_sample)
        return largest.wall + a_sample * (batch - self.largest)

    def _towards(self, wanted: int) -> list[int]:
        """`wanted`, and smaller sizes that are still well above what was measured.

        Where a sample gets cheaper at once in between, the size at which it does goes before those
        below, none of which would end sooner.
        """
        sizes = [wanted]
        while (smaller := sizes[-1] * 3 // 4) >= MIN_GROWTH * self.largest:
            sizes.append(smaller)
        change = self.limits.cheaper_from
        if change is not None and self._crosses(wanted):
            beyond = [size for size in sizes if size > change]
            return [*beyond, change, *(size for size in sizes if size < change)]
        return sizes

    def _crosses(self, batch: int) -> bool:
        """Whether a sample gets cheaper at once between the largest size so far and `batch`."""
        change = self.limits.cheaper_from
        return change is not None and self.largest < change <= batch

    # -- passes ----------------------------------------------------------------------------------

    def repeat(self, batch: int, seconds: float) -> None:
        """Add passes while the next is expected to end within `seconds`."""
        found, until = self.done[batch], self.clock.wall() + seconds
        while found.count < MAXIMUM_PASSES and self.clock.wall() + found.longest <= until:
            self._another(found)

    def run_again(self) -> None:
        """Run sizes that were run once as a whole, largest first, as far as time allows.

        Later where no other size shows what a sample costs once it has got cheaper.
        """
        for batch, found in sorted(self.done.items(), reverse=True):
            expected, until = found.longest, self._allowed_seconds()
            if self._alone_beyond_change(batch):
                expected, until = expected / FIRST_PASS, self._late_seconds()
            if expected <= until and found.is_cold and not self.limits.apart(batch):
                found.whole.append(self._whole(batch))

    def _alone_beyond_change(self, batch: int) -> bool:
        change = self.limits.cheaper_from
        return change is not None and [size for size in self.done if size >= change] == [batch]

    def fill(self) -> None:
        """Where the budget is spent, repeat sizes, largest first, in the time that remains."""
        if self.left_seconds() <= 0:
            for batch in sorted(self.done, reverse=True):
                self.repeat(batch, self._enough_seconds())

    def _another(self, found: BatchPasses) -> None:
        """Whole ones and such by units take turns, where both can be made."""
        apart = self.limits.apart(found.batch)
        if not apart and len(found.whole) <= len(found.units):
            found.whole.append(self._whole(found.batch))
        elif len(found.units) < 2 * len(found.split) or not found.split:
            found.units.append(self._units(found.batch, split=False))
        else:
            found.split.append(self._units(found.batch, split=True))

    def _whole(self, batch: int) -> WholePass:
        self.runner.begin_whole(batch)
        begin = self._look()
        self.runner.forward_whole()
        between = self.clock.cpu()
        self.runner.backward_whole()
        span = self._span(begin)
        return WholePass(between - begin[1], begin[1] + span.cpu - between, span.wall)

    def _units(self, batch: int, *, split: bool) -> UnitPass:
        """All units forward, then all backward; or each by itself."""
        units, apart = range(self.runner.unit_count), self.limits.apart(batch)
        if apart and not self.spans and len(units) >= MANY_UNITS:
            self._warm_up(batch, split=split)
        self.runner.begin(batch, split=split, apart=apart)
        begin = self._look()
        forward, backward = [], []
        for unit in units:
            self.runner.prepare(unit)
            forward.append(self._timed(self.runner.forward, unit))
            if apart:
                backward.append(self._backward(unit, split))
        if not apart:
            backward = [self._backward(unit, split) for unit in reversed(units)][::-1]
        return UnitPass(
            forward=tuple(forward),
            backward=tuple(inputs + weight for inputs, weight in backward),
            weight=tuple(weight for _, weight in backward) if split else None,
            wall=self._span(begin).wall,
        )

    def _warm_up(self, batch: int, *, split: bool) -> None:
        """Run the first unit, which does not count."""
        begin = self._look()
        self.runner.warm_up(batch, split=split)
        self._span(begin)

    def _backward(self, unit: int, split: bool) -> tuple[float, float]:
        """(inputs, weights), or all of it and nothing."""
        if not split:
            return self._timed(self.runner.backward, unit), 0.0
        inputs = self._timed(self.runner.backward_inputs, unit)
        return inputs, self._timed(self.runner.backward_weights, unit)

    def _timed(self, run: Callable[[int], None], unit: int) -> float:
        begin = self.clock.cpu()
        run(unit)
        return self.clock.cpu() - begin

    def _look(self) -> tuple[float, float]:
        return self.clock.wall(), self.clock.cpu()

    def _span(self, begin: tuple[float, float]) -> CpuSpan:
        span = CpuSpan(self.clock.wall() - begin[0], self.clock.cpu() - begin[1])
        self.spans.append(span)
        return span
