"""When FTPipeHD repartitions the model, and the device capacities it uses. Pure.

A device i with the units S_i reports how long it took for each mini-batch; T0_l is the time of unit
l in the profile of the device with the data (section III-D, equations 1 to 3):

    C_i = mean time of i / sum of T0_l over S_i            time of unit l on i:  C_i · T0_l

A device that has reported nothing has capacity 1. Two things differ from the paper. The device with
the data is measured like all others, where the paper sets its capacity to 1: it was profiled while
idle, and every device is slower in training. And the tasks of a device with little to do are mostly
messages, so below a share of the time its reports only bound its capacity: its tasks take no
more than that share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from statistics import fmean, median

from p2ptrain.recovery.commit import Seat
from p2ptrain.recovery.recovery_settings import HOME
from p2ptrain.recovery.watch.profile_corrections import (
    ExpectedSeconds,
    ProfileCorrections,
    StageSeconds,
)

_MIN_FACTOR, _MAX_FACTOR = 0.02, 50.0
"""Of a capacity, as of any correction: what lies beyond is a fault of the measurement."""


class RepartitionSchedule:
    """Counts mini-batches, over all plans of a job, and takes means of what they take.

    Args:
        first: mini-batches before the first look at the cuts.
        every: between two looks from then on.
    """

    def __init__(self, first: int, every: int) -> None:
        self._left = first
        self._every = every
        self._least = max(min(first, every) - 1, 1)  # reports that a look needs
        self._seats: frozenset[Seat] = frozenset()
        self._is_warm = False
        self._busy: list[Mapping[Seat, StageSeconds]] = []
        self._seconds: list[float] = []

    def begin(self, seats: Collection[Seat]) -> None:
        """Another plan is in force: what was reported under the one before counts no more."""
        self._seats, self._is_warm = frozenset(seats), False
        self._forget()

    def observe(
        self, busy: Mapping[Seat, StageSeconds], seconds: float
    ) -> Mapping[Seat, StageSeconds] | None:
        """Take in a mini-batch; returns means since the last look where the next one is due.

        Args:
            busy: what its tasks have taken, by stage and device.
            seconds: since the mini-batch before.
        """
        self._left -= 1
        if busy.keys() != self._seats:
            return None
        if not self._is_warm:  # the first fills the pipeline, and finds memory
            self._is_warm = True
            return None
        self._busy.append(busy)
        self._seconds.append(seconds)
        if self._left > 0 or len(self._busy) < self._least:
            return None
        step_seconds = median(self._seconds)
        means = {
            seat: StageSeconds(
                fmean(one[seat].wall for one in self._busy),
                fmean(one[seat].cpu for one in self._busy),
                step_seconds,
            )
            for seat in self._seats
        }
        self._left = self._every
        self._forget()
        return means

    def _forget(self) -> None:
        self._busy.clear()
        self._seconds.clear()


def capacities(
    before: ProfileCorrections,
    expected: Mapping[Seat, ExpectedSeconds],
    busy: Mapping[Seat, StageSeconds],
    judged_share: float = HOME.repartition_judged_share,
) -> ProfileCorrections:
    """The capacities of the devices of a plan; others' stay as they are.

    Args:
        before: capacities so far, which `expected` was made with: C_i times the sum of T0_l.
        busy: what the plan's stages have taken, and the seconds of a step.
        judged_share: of a step, that a device's tasks take where it is judged by them.
    """
    due: dict[str, float] = defaultdict(float)
    took: dict[str, float] = defaultdict(float)
    step_seconds = 0.0
    for seat, one in busy.items():
        due[seat[1]] += expected[seat].wall
        took[seat[1]] += one.wall
        step_seconds = one.round_seconds
    found = dict(before.devices)
    for device, seconds in took.items():
        if due[device] <= 0 or seconds <= 0:
            continue
        least = judged_share * step_seconds
        counted = seconds if seconds >= least else min(due[device], least)
        capacity = before.of_device(device) * counted / due[device]
        found[device] = min(max(capacity, _MIN_FACTOR), _MAX_FACTOR)
    return ProfileCorrections(devices=found)


def expected_with(
    expected: Mapping[Seat, ExpectedSeconds], before: ProfileCorrections, after: ProfileCorrections
) -> dict[Seat, ExpectedSeconds]:
    """What a plan expects with other capacities than those it was made with."""
    found = {}
    for seat, due in expected.items():
        factor = after.of_device(seat[1]) / before.of_device(seat[1])
        found[seat] = ExpectedSeconds(due.wall * factor, due.cpu * factor)
    return found
