"""Measured times of a model's units by batch size, and what lies between the measurements.

Time is not linear in the number of samples (a batch of 1 costs far more than a sixteenth of a
batch of 16), so several sizes are measured and joined by straight lines.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from p2ptrain.errors import OptionError
from p2ptrain.net.forms import By, Rare
from p2ptrain.net.read_form import shown
from p2ptrain.plan.types.planning_file import MANY, Number

MIN_OF_A_SAMPLE = 0.85
"""Beyond the largest size a further sample costs this part of one there, at least."""

FULL_SAMPLES = 64
"""From such a size on it costs more than one there: caches are full, and blocks of memory so large
that they come from the kernel each time."""

MAX_OF_A_SAMPLE = 1.1
"""So much then. A MobileNetV2 with 0.28 core trained 178 samples/s in micro-batches of 128 and 166
of 410 (`python -m tools.bench --only P1/mobilenetv2/L/auto --train "--micro-batch 128"`)."""

MAX_OF_ANY_SIZE = 0.4
"""Where only one size was measured: the part of its time that any other takes too, at most. Weights
that are read and operators that are begun cost the same for any, and a device that comes to one
size only is slow at it for just that."""

FLOPS_A_BYTE = 40.0
"""A byte of weights, read and its gradient written, costs as much as so many operations of a
forward and what follows from them: about, by a BERT and a ViT on one core. YOLOv2 spends nothing
on weights to speak of, and what eight images of it take seemed 0.58 of what it was."""


def bytes_by_flop(units: Iterable[tuple[int, int]]) -> float:
    """Of a model's weights, by operations of one sample's forward, as `completed` asks.

    Args:
        units: (bytes of parameters, flops of one sample's forward) of each.
    """
    each = list(units)
    flops = sum(of_unit for _, of_unit in each)
    return sum(nbytes for nbytes, _ in each) / flops if flops else math.inf


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Seconds of each unit, forward and backward, for one number of samples.

    Attributes:
        weight: the part of the backward that gradients of weights take; empty = unknown, so that
            nothing is gained by computing them later.
    """

    forward: Annotated[tuple[Number, ...], MANY]
    backward: Annotated[tuple[Number, ...], MANY]
    weight: Annotated[tuple[Number, ...], MANY, Rare()] = ()


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Seconds per unit by batch size; `sizes` ascends, `times` is parallel to it."""

    sizes: tuple[int, ...]
    times: tuple[UnitTimes, ...]

    @property
    def unit_count(self) -> int:
        """How many units were measured."""
        return len(self.times[0].forward)

    def at(self, samples: int) -> UnitTimes:
        """Seconds of each unit for `samples` samples.

        Linear between measured sizes; above the largest its cost per sample; below the smallest
        proportional, but at least half of the smallest's time (a kernel launch is never free).
        """
        place = bisect_left(self.sizes, samples)
        if place == len(self.sizes):
            return _scaled(self.times[-1], samples / self.sizes[-1])
        if self.sizes[place] == samples:
            return self.times[place]
        if place == 0:
            return _scaled(self.times[0], max(samples / self.sizes[0], 0.5))
        low, high = self.sizes[place - 1], self.sizes[place]
        return _between(self.times[place - 1], self.times[place], (samples - low) / (high - low))

    def times_slowdown(self, slowdown: float) -> TimeTable:
        """The same table on a device that takes `slowdown` times as long."""
        return TimeTable(self.sizes, tuple(_scaled(times, slowdown) for times in self.times))

    def before_gain(self, samples: int, units: Collection[int]) -> TimeTable:
        """This table with the size below `samples`, from which on `units` cost less at once.

        A line from a smaller size to a larger one would promise some of that gain to all between.
        Of the other units that line is true.
        """
        last = samples - 1
        if last in self.sizes or not self.sizes[0] < last < self.sizes[-1]:
            return self
        place = bisect_left(self.sizes, last)
        below = TimeTable(self.sizes[:place], self.times[:place]).completed(last).at(last)
        straight = self.at(last)

        def chosen(gains: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
            return tuple(
                max(gain, other) if unit in units else other
                for unit, (gain, other) in enumerate(zip(gains, others, strict=True))
            )

        times = UnitTimes(
            chosen(below.forward, straight.forward),
            chosen(below.backward, straight.backward),
            chosen(below.weight, straight.weight) if straight.weight else (),
        )
        return TimeTable(
            (*self.sizes[:place], last, *self.sizes[place:]),
            (*self.times[:place], times, *self.times[place:]),
        )

    def extended_like(self, reference: TimeTable) -> TimeTable:
        """This table with the larger sizes that only `reference` has.

        A device too slow to measure a large batch is not as slow with it as its small batches
        suggest: its times grow from its own largest size as the reference's grow.
        """
        largest = self.sizes[-1]
        base, own = reference.at(largest), self.times[-1]
        added = [size for size in reference.sizes if size > largest]
        grown = [_grown(own, base, reference.at(size)) for size in added]
        return TimeTable((*self.sizes, *added), (*self.times, *grown))

    def completed(self, samples: int, weights: float = math.inf) -> TimeTable:
        """This table from a single sample up to `samples`, on the lines through its outer sizes.

        Most of a small batch's time does not depend on its size, so one sample costs more than its
        part of the smallest size; and a sample in a larger batch costs less than in the largest,
        though never much less, as caches do not grow; beyond FULL_SAMPLES a little more. Of a
        single size it is assumed what part any takes, or micro-batches of one sample would seem as
        good as others.

        Args:
            samples: of the largest size.
            weights: the model's, in bytes by operations (`bytes_by_flop`).
        """
        if len(self.sizes) < 2:
            return self._grown_from_one(samples, weights)
        first, last = self.sizes[0], self.sizes[-1]
        sizes, times = list(self.sizes), list(self.times)
        if samples > last:
            sizes.append(samples)
            times.append(_on_line(self.times[-1], self.times[-2], self.sizes[-2:][::-1], samples))
        if first > 1:
            sizes.insert(0, 1)
            times.insert(0, _on_line(self.times[0], self.times[1], self.sizes[:2], 1))
        return TimeTable(tuple(sizes), tuple(times))

    def _grown_from_one(self, samples: int, weights: float) -> TimeTable:
        measured, times = self.sizes[0], self.times[0]
        sizes = sorted({1, measured, max(measured, samples)})
        of_weights = FLOPS_A_BYTE * weights
        of_any = min(MAX_OF_ANY_SIZE, 1 - measured / (of_weights + measured))
        growth = [1 + (1 - of_any) * (size / measured - 1) for size in sizes]
        return TimeTable(tuple(sizes), tuple(_scaled(times, factor) for factor in growth))


def _grown(own: UnitTimes, base: UnitTimes, larger: UnitTimes) -> UnitTimes:
    """`own`, each unit grown as it does from `base` to `larger`, and all together as the sums do.

    A unit's part of the whole changes with the size, on every device in much the same way; the sums
    are what is known best.
    """
    forward = _alike(own.forward, base.forward, larger.forward)
    backward = _alike(own.backward, base.backward, larger.backward)
    weight = tuple(
        part * now / before if before else 0.0
        for part, before, now in zip(own.weight, own.backward, backward, strict=bool(own.weight))
    )
    return UnitTimes(forward, backward, weight)


def _alike(
    own: Sequence[float], base: Sequence[float], larger: Sequence[float]
) -> tuple[float, ...]:
    together = sum(larger) / sum(base) if any(base) else 1.0
    grown = [
        mine * (after / before if before else together)
        for mine, before, after in zip(own, base, larger, strict=True)
    ]
    factor = together * sum(own) / sum(grown) if any(grown) else 1.0
    return tuple(factor * mine for mine in grown)


def _on_line(near: UnitTimes, far: UnitTimes, sizes: Sequence[int], samples: int) -> UnitTimes:
    """`near`, as the sums continue on the line through both: single units are too noisy.

    Args:
        sizes: of `near` and `far`.
        samples: beyond `near`, seen from `far`.
    """

    def factor(near_seconds: float, far_seconds: float) -> float:
        in_proportion = samples / sizes[0]
        if not near_seconds:
            return in_proportion
        slope = (far_seconds / near_seconds - 1) / (sizes[1] - sizes[0])
        on_line = 1 + slope * (samples - sizes[0])
        if samples > sizes[0]:
            if sizes[0] >= FULL_SAMPLES:
                return 1 + MAX_OF_A_SAMPLE * (in_proportion - 1)
            least = 1 + MIN_OF_A_SAMPLE * (in_proportion - 1)
            return min(max(on_line, least), in_proportion)
        return min(max(on_line, in_proportion), 1.0)

    forward = factor(sum(near.forward), sum(far.forward))
    backward = factor(sum(near.backward), sum(far.backward))
    return UnitTimes(
        tuple(forward * seconds for seconds in near.forward),
        tuple(backward * seconds for seconds in near.backward),
        tuple(backward * seconds for seconds in near.weight),
    )


def _table(by_size: Mapping[str, UnitTimes]) -> TimeTable:
    """From `times` of a file. Raises OptionError: they fit no model."""
    if not by_size:
        raise OptionError("expected times by batch size, at least one size")
    found: dict[int, UnitTimes] = {}
    for key, times in by_size.items():
        size = _batch_size(key)
        if size in found:
            raise OptionError(f'batch size {size} is given twice ("{key}")')
        _check(times, f'of batch size "{key}"')
        found[size] = times
    if len({len(times.forward) for times in found.values()}) != 1:
        raise OptionError("batch sizes differ in their number of units")
    if len({len(times.weight) for times in found.values()}) != 1:
        raise OptionError('some batch sizes have times of "weight" and some have not')
    sizes = tuple(sorted(found))
    return TimeTable(sizes, tuple(found[size] for size in sizes))


def _by_size(table: TimeTable) -> dict[str, UnitTimes]:
    return {str(size): times for size, times in zip(table.sizes, table.times, strict=True)}


Times: TypeAlias = Annotated[
    TimeTable, By(_table, _by_size, Annotated[Mapping[str, UnitTimes], MANY])
]
"""As in a profile's or a device's "times"."""


def _batch_size(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 9:
        raise OptionError(f"a batch size must be a whole number, found {shown(key)}")
    if int(key) == 0:
        raise OptionError(f"a batch size must be at least 1, found {shown(key)}")
    return int(key)


def _check(times: UnitTimes, where: str) -> None:
    units = len(times.forward)
    if not units:
        raise OptionError(f"{where}: expected one time a unit, found none")
    if len(times.backward) != units:
        raise OptionError(f"{where}: {units} forward times but {len(times.backward)} backward")
    if times.weight and len(times.weight) != units:
        raise OptionError(f"{where}: {units} backward times but {len(times.weight)} weight")
    for i, (part, whole) in enumerate(zip(times.weight, times.backward, strict=False)):
        if part > whole:
            raise OptionError(
                f"{where}: weight[{i}]: {part} is more than the whole backward, {whole}"
            )


def _scaled(times: UnitTimes, factor: float) -> UnitTimes:
    if factor == 1.0:
        return times
    return UnitTimes(
        tuple(seconds * factor for seconds in times.forward),
        tuple(seconds * factor for seconds in times.backward),
        tuple(seconds * factor for seconds in times.weight),
    )


def _between(low: UnitTimes, high: UnitTimes, part: float) -> UnitTimes:
    return UnitTimes(
        tuple(a + (b - a) * part for a, b in zip(low.forward, high.forward, strict=True)),
        tuple(a + (b - a) * part for a, b in zip(low.backward, high.backward, strict=True)),
        tuple(a + (b - a) * part for a, b in zip(low.weight, high.weight, strict=True)),
    )
