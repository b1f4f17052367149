"""Devices with the same kind of processor share what they have measured of a model. Pure.

A profile is a few passes within seconds, so its times have errors, and a search among thousands of
plans finds those that such errors favour. One kind of processor takes the same processor time for
the same work; which share of its core a device gives us is its own (`wall_by_cpu`).

A slow device measures large batches once or not at all, and a first pass is slow. So warm times of
others of its kind are preferred. Beyond all warm sizes a first pass counts where it is below the
extrapolation: both are too high rather than too low.

The ratios of units and sizes are the kind's. How fast the device is within its kind is its own,
as far as that is more than noise: caches are colder on a busy core. A size that only some have
measured is scaled to the level of all, or it would look cheap where only a fast device measured it.
A device that has measured half of a size contributes through the line through its own sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import copysign, exp, log
from statistics import fmean, median

from p2ptrain.plan.types.cluster import Overheads
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes

NOISE = 0.1
"""Part of a difference from its kind, as a logarithm, that does not count."""

REACH = 2.0
"""Beyond the largest size that a device has run warm, how far what follows from it is as good as
what one that has come there found in a pass or two."""

FAR_OFF = 1.75
"""Who takes so many times more or less processor time than the median of its kind is another."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """What a device has found, in wall seconds.

    Attributes:
        kind: of its processor; "" where it does not know: no device is alike.
        wall_by_cpu: wall seconds for one of processor time, above 0.
        overheads: None where it did not measure them.
        cold: sizes whose times are of a first pass.
        cheaper_from: size from which samples cost less at once (`profiling/measure_units.py`), so
            that nothing smaller says what larger ones take.
    """

    kind: str
    wall_by_cpu: float
    times: TimeTable
    overheads: Overheads | None
    cold: frozenset[int] = frozenset()
    cheaper_from: int | None = None

    @property
    def warm(self) -> tuple[int, ...]:
        """Sizes that others may rely on, ascending: the others, if there are any."""
        return tuple(size for size in self.times.sizes if size not in self.cold) or self.times.sizes

    def covers(self, size: int) -> bool:
        """Whether it lies between those."""
        return self.warm[0] <= size <= self.warm[-1]

    def estimate(self, size: int) -> UnitTimes | None:
        """Where it lies between those, or not far beyond several."""
        if self.covers(size):
            return self.times.at(size)
        if self.cheaper_from is not None and self.warm[-1] < self.cheaper_from <= size:
            return None
        if len(self.warm) > 1 and self.warm[-1] < size <= REACH * self.warm[-1]:
            return self._warm_times.completed(size).at(size)
        return None

    @property
    def _warm_times(self) -> TimeTable:
        return TimeTable(self.warm, tuple(self.times.at(size) for size in self.warm))

    def spans(self, size: int) -> bool:
        """Whether it lies between any that were measured."""
        return self.times.sizes[0] <= size <= self.times.sizes[-1]

    def times_slowdown(self, slowdown: float) -> DeviceProfile:
        """All of it on a device that takes `slowdown` times as long."""
        overheads = self.overheads
        return replace(
            self,
            wall_by_cpu=self.wall_by_cpu * slowdown,
            times=self.times.times_slowdown(slowdown),
            overheads=None if overheads is None else overheads.times_slowdown(slowdown),
        )


def pool_profiles(found: Mapping[str, DeviceProfile]) -> dict[str, DeviceProfile]:
    """By name, with means in place of what devices of one kind have found."""
    kinds: dict[tuple[str, int], list[str]] = {}
    for name, one in found.items():
        if one.kind:
            kinds.setdefault((one.kind, one.times.unit_count), []).append(name)
    result = {
        name: replace(one, times=_without_cold_passes(one.times, one.cold))
        for name, one in found.items()
    }
    for names in kinds.values():
        own = {name: found[name].times_slowdown(1 / found[name].wall_by_cpu) for name in names}
        levels = _levels(own)
        if len(levels) > 1:
            mean = _mean([_at_level(own[name], level) for name, level in levels.items()])
            for name, level in levels.items():
                wall_by_cpu = found[name].wall_by_cpu
                slower = mean.times_slowdown(wall_by_cpu * _beyond_noise(level))
                result[name] = replace(slower, wall_by_cpu=wall_by_cpu)
    return result


def _levels(own: Mapping[str, DeviceProfile]) -> dict[str, float]:
    """Those that are not far off, and how many times as long as their mean each takes.

    At the largest size that all have measured warm. None where the middle is between two halves.
    """
    size = min(one.warm[-1] for one in own.values())
    seconds = {name: _whole(one.times.at(size)) for name, one in own.items()}
    middle = median(seconds.values())
    near = {n: took for n, took in seconds.items() if middle / FAR_OFF <= took <= middle * FAR_OFF}
    if not near:
        return {}
    mean = fmean(near.values())
    return {name: took / mean for name, took in near.items()}


def _at_level(own: DeviceProfile, level: float) -> DeviceProfile:
    """Its units as a device of level 1 would have found them."""
    return replace(own, times=own.times.times_slowdown(1 / level))


def _beyond_noise(ratio: float) -> float:
    difference = log(ratio)
    return exp(copysign(max(0.0, abs(difference) - NOISE), difference))


def _whole(times: UnitTimes) -> float:
    return sum(times.forward) + sum(times.backward)


def _mean(own: Sequence[DeviceProfile]) -> DeviceProfile:
    """At every size that one of them has measured, of all who can say something about it.

    By warm ones, where a device has such.
    """
    warm = sorted({size for one in own for size in one.warm})
    beyond = {size for one in own for size in one.times.sizes if size > warm[-1]}
    sizes = (*warm, *sorted(beyond))
    times = tuple(
        _mean_times(
            [times for one in own if size in warm and (times := one.estimate(size)) is not None]
            or [one.times.at(size) for one in own if one.spans(size)]
        )
        for size in sizes
    )
    known = [asdict(one.overheads) for one in own if one.overheads is not None]
    overheads = {name: fmean(one[name] for one in known) for name in known[0]} if known else None
    return DeviceProfile(
        kind=own[0].kind,
        wall_by_cpu=1.0,
        times=_without_cold_passes(TimeTable(sizes, times), beyond),
        overheads=None if overheads is None else Overheads(**overheads),
    )


def _without_cold_passes(times: TimeTable, cold: Collection[int]) -> TimeTable:
    """Without first passes beyond warm ones that took longer than follows from those."""
    found = [(s, t) for s, t in zip(times.sizes, times.times, strict=True) if s not in cold]
    if len(found) < 2:
        return times
    for size in sorted(cold):
        warm = TimeTable(*zip(*found, strict=True))
        if size > found[-1][0] and _whole(times.at(size)) < _whole(warm.completed(size).at(size)):
            found.append((size, times.at(size)))
    return TimeTable(*zip(*found, strict=True))


def _mean_times(found: Sequence[UnitTimes]) -> UnitTimes:
    def mean(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(map(fmean, zip(*rows, strict=True)))

    weights = [times.weight for times in found]
    return UnitTimes(
        forward=mean([times.forward for times in found]),
        backward=mean([times.backward for times in found]),
        weight=mean(weights) if all(weights) else (),
    )


def mixed_kinds(kinds: Mapping[str, str]) -> tuple[str, ...]:
    """What a plan changes whose devices are of several kinds: a sentence, or none.

    Args:
        kinds: of each device of the plan, by its name; "" where it is not known.
    """
    known: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        known.setdefault(kind or "unknown", []).append(name)
    if len(known) < 2:
        return ()
    named = "; ".join(f"{', '.join(sorted(names))}: {kind}" for kind, names in known.items())
    return (
        "its devices compute with other processors, accelerators, threads or versions of torch "
        f"({named}): the last bits of a result depend on which device computes what",
    )
