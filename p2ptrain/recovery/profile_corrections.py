"""What training has shown to be wrong with the profiles that plans are made from. Pure.

A profile is measured in seconds of an idle device; a stage in training takes something else. Two
causes are separated by the processor time of the compute thread and the wall time:

    units      more work than measured: processor time, when a unit first trains. The model is the
               same on every device, so it counts for all
    devices    slower than before: wall time per processor time, and processor time that changed

Messages are handled beside the compute thread on the same core. Plans count them separately, so
tasks may take longer by that much.

A device that waits during part of a round looks faster than it is: a rested processor runs ahead
(unused core share, a cooler chip). Of a device that is busy for the part u of a round, tasks would
take between 1 and 1 / u times as long with a full round. If it looks too slow, it is; if it looks
too fast, the slowest of that range is used. So no device is overrated, and one that delays the
others no more is found faster round by round.

A device whose tasks are a small part of the round is not judged by them: they show mostly messages
and a used-up share of a core. It delays no other device meanwhile; once it does, it is judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from p2ptrain.errors import ProtocolError
from p2ptrain.recovery.commit import Seat

JUDGED_SHARE = 1 / 3
"""Of a round: a device is judged only if its tasks take so much of it."""

MIN_FACTOR, MAX_FACTOR = 0.02, 50.0
"""Of a factor: what lies beyond is a fault of the measurement."""


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of a stage's tasks in one round.

    Attributes:
        wall: of the world.
        cpu: of the processor.
        round_seconds: of the round, where the device waits for others; 0 = it had work for all of
            it.
    """

    wall: float
    cpu: float
    round_seconds: float = 0.0

    @property
    def holds_up(self) -> bool:
        """Whether others may have to wait for it."""
        return self.wall >= JUDGED_SHARE * self.round_seconds

    @property
    def full_wall(self) -> float:
        """`wall`, had the device had work for all of the round, at the slowest; see the module."""
        return max(self.wall, self.round_seconds)


@dataclass(frozen=True, slots=True)
class ExpectedSeconds:
    """What a plan expects a stage's tasks to take on one device in one round, in seconds.

    Attributes:
        wall, cpu: of computing.
        beside: of messages, on the wall.
    """

    wall: float
    cpu: float
    beside: float = 0.0

    def factor(self, busy: StageSeconds) -> float:
        """How many times as long as expected the tasks take; 1.0 where messages explain it."""
        return _off(busy, self.wall, self.beside)

    def work_factor(self, busy: StageSeconds) -> float:
        """How many times as much processor time."""
        return _ratio(busy.cpu, self.cpu)

    def share_factor(self, busy: StageSeconds) -> float:
        """How many times as long a second of processor time takes."""
        if self.cpu <= 0 or busy.cpu <= 0:
            return self.factor(busy)
        return _off(busy, self.wall / self.cpu * busy.cpu, self.beside)


@dataclass(frozen=True, slots=True)
class ProfileCorrections:
    """Factors on profiles.

    Attributes:
        units: by unit; empty = nothing was seen in training yet.
        devices: by id; who is not in it is as it was measured.
        work: of those, by id, the part that is processor time; the rest is time on the wall for it.
    """

    units: tuple[float, ...] = ()
    devices: Mapping[str, float] = field(default_factory=dict, hash=False)
    work: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for factor in (*self.units, *self.devices.values(), *self.work.values()):
            if not MIN_FACTOR <= factor <= MAX_FACTOR:
                raise ProtocolError(f"a correction of {factor}")

    def of_device(self, device: str) -> float:
        """How many times as long as measured it takes."""
        return self.devices.get(device, 1.0)

    def of_share(self, device: str) -> float:
        """How many times as long as measured a second of its processor takes."""
        return self.of_device(device) / self.work.get(device, 1.0)

    def learned(
        self,
        ranges: Mapping[int, tuple[int, int]],
        expected: Mapping[Seat, ExpectedSeconds],
        busy: Mapping[Seat, StageSeconds],
    ) -> ProfileCorrections:
        """With what a look has found.

        Args:
            ranges: units [first, end) by stage; together all of the model.
            expected: with these corrections already.
        """
        is_first = not self.units
        units = list(self.units) or [1.0] * max(end for _, end in ranges.values())
        found: dict[str, list[tuple[float, float]]] = {}  # (weight, factor) of each stage
        worked: dict[str, list[tuple[float, float]]] = {}  # the same, of processor time alone
        for stage, (first, end) in ranges.items():
            seats = [seat for seat in expected if seat[0] == stage]
            counted = sum(expected[seat].cpu for seat in seats)
            work = _ratio(sum(busy[seat].cpu for seat in seats), counted) if is_first else 1.0
            for unit in range(first, end):
                units[unit] = _bounded(units[unit] * work)
            for seat in seats:
                due = expected[seat]
                is_judged = busy[seat].holds_up
                more = due.work_factor(busy[seat]) / work if is_judged else 1.0
                factor = more * due.share_factor(busy[seat])
                found.setdefault(seat[1], []).append((due.wall, factor))
                worked.setdefault(seat[1], []).append((due.wall, more))
        devices, works = dict(self.devices), dict(self.work)
        for device, factors in found.items():
            devices[device] = _bounded(self.of_device(device) * _mean(factors))
            works[device] = _bounded(works.get(device, 1.0) * _mean(worked[device]))
        return ProfileCorrections(tuple(units), devices, works)


def work_ratio(
    expected: Mapping[Seat, ExpectedSeconds], busy: Mapping[Seat, StageSeconds]
) -> float:
    """How many times as much of the processors all tasks take as expected.

    Every stage on every device counts by the time that was expected of it.
    """
    due = sum(one.wall for one in expected.values())
    taken = sum(one.wall * one.work_factor(busy[seat]) for seat, one in expected.items())
    return _ratio(taken, due)


def as_they_are(
    expected: Mapping[Seat, ExpectedSeconds], busy: Mapping[Seat, StageSeconds]
) -> dict[Seat, ExpectedSeconds]:
    """What is to be expected when a look has changed nothing: what is believed now."""
    found: dict[Seat, ExpectedSeconds] = {}
    for seat, due in expected.items():
        factor = _scale(busy[seat], due.wall, due.beside)
        beside = due.beside * max(factor, 1.0)
        found[seat] = ExpectedSeconds(due.wall * factor, busy[seat].cpu, beside)
    return found


def _off(busy: StageSeconds, wall: float, beside: float) -> float:
    return _bounded(_scale(busy, wall, beside))


def _scale(busy: StageSeconds, wall: float, beside: float) -> float:
    if wall <= 0 or busy.wall <= 0:
        return 1.0
    if busy.wall > wall + beside:
        return busy.wall / (wall + beside) if busy.holds_up else 1.0
    return min(busy.full_wall / wall, 1.0)


def _ratio(value: float, by: float) -> float:
    return _bounded(value / by) if by > 0 and value > 0 else 1.0


def _bounded(factor: float) -> float:
    return min(max(factor, MIN_FACTOR), MAX_FACTOR) if math.isfinite(factor) else 1.0


def _mean(weighted: list[tuple[float, float]]) -> float:
    """By weight; where nothing weighs anything, the plain one."""
    total = sum(weight for weight, _ in weighted)
    if total <= 0:
        return sum(factor for _, factor in weighted) / len(weighted)
    return sum(weight * factor for weight, factor in weighted) / total
