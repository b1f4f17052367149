"""What timing runs, its clock and limits, and how passes over a model become times of its units.

A unit that runs by itself begins and ends a graph of autograd's, which a stage of many units does
only once. That costs the same for every unit, so it is taken off each; then all are scaled to what
the whole model takes. A backward in two parts takes longer than a whole one, so it only says what
the parts' shares are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.plan.types.unit_times import UnitTimes
from p2ptrain.process.cpu_share import thread_clock


@dataclass(frozen=True, slots=True)
class CpuClock:
    """Seconds, both monotonic: `wall` of the world, `cpu` used by the calling thread."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = field(default_factory=thread_clock)

    @classmethod
    def of(cls, device: ComputeDevice) -> CpuClock:
        """For passes on `device`.

        An accelerator computes while the thread continues: both clocks are the world's, once it has
        done everything. It shares no core with other programs.
        """
        if device.is_host:
            return cls()

        def done() -> float:
            device.wait()
            return time.perf_counter()

        return cls(done, done)

    @property
    def is_one(self) -> bool:
        """Both are the same: a second of computing takes a second."""
        return self.wall is self.cpu


def never(_error: BaseException) -> bool:
    """No error is expected."""
    return False


@dataclass(frozen=True, slots=True)
class TimingLimits:
    """What passes may take.

    Attributes:
        budget_seconds: for all sizes, with passes repeated where there is time.
        most_seconds: a slow device may take so long instead, for larger sizes and no repetition:
            planners must know how much cheaper a sample is in a large batch.
        may_run: whether there is memory for a batch size.
        apart: asked before each pass: whether one unit after the other runs alone.
        enough_seconds: of those, what it may take for more than a second size, half as large as
            asked for, that it has not run cold.
        every_size: each is run as it was asked for, at least once, however long it takes.
        largest_second: the largest size is measured after the smallest.
        cheaper_from: size from which a sample gets cheaper at once; None = no such size is known.
        settle_seconds: for passes before all that count, until they take equally long: clocks of
            an accelerator rise with work, and its kernels are loaded when they are first used.
        is_too_large: whether an error of a larger size says only that it needs too much memory;
            then no larger one is measured.
    """

    budget_seconds: float
    most_seconds: float = 0.0
    enough_seconds: float = inf
    every_size: bool = False
    largest_second: bool = False
    cheaper_from: int | None = None
    may_run: Callable[[int], bool] = lambda batch: True
    apart: Callable[[int], bool] = lambda batch: False
    settle_seconds: float = 0.0
    is_too_large: Callable[[BaseException], bool] = never


@dataclass(frozen=True, slots=True)
class UnitTimings:
    """What `time_units` found.

    Attributes:
        times: wall seconds by batch size, ascending.
        wall_by_cpu: the factor that made them of CPU seconds.
        cold: batch sizes that were run once, which takes longer than they will.
    """

    times: dict[int, UnitTimes]
    wall_by_cpu: float
    cold: tuple[int, ...]


T = TypeVar("T")

MIN_OWN_PART = 0.1
"""Of a unit's time, that is its own at least."""


@dataclass(frozen=True, slots=True)
class UnitPass:
    """CPU seconds of each unit in a pass of one after the other; wall seconds of all.

    Attributes:
        weight: part of `backward`; None where the backwards were whole.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...] | None
    wall: float


@dataclass(frozen=True, slots=True)
class WholePass:
    """CPU seconds of the model as one stage; wall seconds of both."""

    forward: float
    backward: float
    wall: float


@dataclass(slots=True)
class BatchPasses:
    """All passes of one batch size; the first of each kind warmed something up.

    Attributes:
        split: by units, with backwards in two parts.
        units: by units.
        whole: of the model as one stage.
        is_ready: whether another pass has come before these.
    """

    batch: int
    split: list[UnitPass] = field(default_factory=list)
    units: list[UnitPass] = field(default_factory=list)
    whole: list[WholePass] = field(default_factory=list)
    is_ready: bool = False

    @property
    def is_cold(self) -> bool:
        """Whether there was time for a single one, in which kernels and memory were prepared."""
        return not self.is_ready and self.count < 2

    @property
    def count(self) -> int:
        """How many."""
        return len(self.split) + len(self.units) + len(self.whole)

    @property
    def wall(self) -> float:
        """Seconds of the last pass that would count."""
        return (self.whole or self.units or self.split)[-1].wall

    @property
    def longest(self) -> float:
        """Seconds that the next pass may take."""
        return max(kind[-1].wall for kind in (self.split, self.units, self.whole) if kind)

    @property
    def by_units(self) -> list[UnitPass]:
        """Those that say how a batch's time divides among the units."""
        return self.units or _warm(self.split)


def informative_passes(sizes: Sequence[BatchPasses]) -> list[BatchPasses]:
    """Ascending ones without those that were run once and lie between others that were not."""
    warm = [size.batch for size in sizes if not size.is_cold]
    if not warm:
        return [*sizes]
    return [s for s in sizes if not s.is_cold or not warm[0] < s.batch < warm[-1]]


def unit_times(sizes: Sequence[BatchPasses], factor: float) -> dict[int, UnitTimes]:
    """Times by batch size.

    Args:
        sizes: ascending; the smallest measured by units, the others so or as a whole.
        factor: from CPU seconds to those that are wanted.
    """
    found: dict[int, UnitTimes] = {}
    switching, shares = _switching(sizes[0]), _weight_shares(sizes[0])
    forward, backward = _parts(sizes[0], switching)
    for size in sizes:
        shares = _weight_shares(size) or shares
        if size.by_units:
            forward, backward = _parts(size, switching)
        weight = tuple(share * whole for share, whole in zip(shares, backward, strict=True))
        parts = UnitTimes(forward, backward, weight)
        found[size.batch] = _as_whole(parts, _counted(size))
    return {batch: _scaled(parts, factor, factor) for batch, parts in found.items()}


def _switching(size: BatchPasses) -> tuple[float, float]:
    """CPU seconds that a unit by itself takes more than inside a stage, forward and backward."""
    whole = _counted(size)
    if not whole or not size.units:
        return 0.0, 0.0
    count = len(size.units[0].forward)
    forward = sum(_medians([one.forward for one in size.units]))
    backward = sum(_medians([one.backward for one in size.units]))
    return (
        max(0.0, forward - statistics.median(one.forward for one in whole)) / count,
        max(0.0, backward - statistics.median(one.backward for one in whole)) / count,
    )


def _weight_shares(size: BatchPasses) -> tuple[float, ...]:
    """Of each unit's backward; empty where no backward was split."""
    parts = [
        _shares(one.weight, one.backward) for one in _warm(size.split) if one.weight is not None
    ]
    return _medians(parts) if parts else ()


def _parts(
    size: BatchPasses, switching: tuple[float, float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Forward and backward of each unit: as run one by one, without what that costs."""
    return (
        _less(_medians([one.forward for one in size.by_units]), switching[0]),
        _less(_medians([one.backward for one in size.by_units]), switching[1]),
    )


def _as_whole(parts: UnitTimes, whole: Sequence[WholePass]) -> UnitTimes:
    """`parts`, whose sums are those of the model as one stage, where that was run."""
    if not whole:
        return parts
    forward = statistics.median(one.forward for one in whole)
    backward = statistics.median(one.backward for one in whole)
    return _scaled(
        parts,
        forward / sum(parts.forward) if any(parts.forward) else 1.0,
        backward / sum(parts.backward) if any(parts.backward) else 1.0,
    )


def _counted(size: BatchPasses) -> list[WholePass]:
    """Whole passes that say what a batch takes.

    A single one, the first, does not where it took longer than the units one by one.
    """
    if len(size.whole) > 1 or not size.units:
        return _warm(size.whole)
    by_units = statistics.median(sum(one.forward) + sum(one.backward) for one in size.units)
    return [one for one in size.whole if one.forward + one.backward <= by_units]


def _scaled(parts: UnitTimes, forward: float, backward: float) -> UnitTimes:
    return UnitTimes(
        tuple(forward * seconds for seconds in parts.forward),
        tuple(backward * seconds for seconds in parts.backward),
        tuple(backward * seconds for seconds in parts.weight),
    )


def _warm(passes: list[T]) -> list[T]:
    """All but the first, if there are more."""
    return passes[1:] or passes


def _less(times: Sequence[float], seconds: float) -> tuple[float, ...]:
    return tuple(max(MIN_OWN_PART * time, time - seconds) for time in times)


def _shares(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, ...]:
    return tuple(
        min(1.0, part / whole) if whole > 0 else 0.0
        for part, whole in zip(parts, wholes, strict=True)
    )


def _medians(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))
