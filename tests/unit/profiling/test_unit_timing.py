from __future__ import annotations

import random
from math import inf
from typing import Any

import pytest

from p2ptrain.plan.types.unit_times import UnitTimes
from p2ptrain.profiling.unit_passes import (
    BatchPasses,
    CpuClock,
    TimingLimits,
    UnitTimings,
    WholePass,
    informative_passes,
)
from p2ptrain.profiling.unit_timing import (
    MAXIMUM_PASSES,
    SECOND_SIZE,
    time_units,
)

COSTS = [(0.001, 0.002), (0.003, 0.004), (0.0, 0.0005)]
"""CPU seconds a sample of three units, forward and backward."""
WEIGHT = 0.25
"""Part of each backward that gradients of weights take."""


class Device:
    """A fake device on a virtual clock: a share of one core in slices of a period.

    Attributes:
        first_pass_factor: how much slower the first pass of each batch size is.
        jitter: largest relative error of a pass.
        split_cost: how much longer each part of a split backward takes.
        fixed: CPU seconds of a forward beside those of its samples.
        fixed_of_last: the same, of the last unit's only.
        switching: CPU seconds of a forward or a backward of a unit by itself beside its own.
        cheaper: (from how many samples, part of its cost that a sample has from there on).
    """

    def __init__(
        self,
        share: float = 1.0,
        *,
        period: float = 0.01,
        first_pass_factor: float = 1.0,
        jitter: float = 0.0,
        split_cost: float = 0.0,
        fixed: float = 0.0,
        fixed_of_last: float = 0.0,
        switching: float = 0.0,
        cheaper: tuple[float, float] = (inf, 1.0),
    ) -> None:
        self.wall = self.cpu = self.in_period = 0.0
        self.share, self.period = share, period
        self.first_pass_factor, self.jitter = first_pass_factor, jitter
        self.split_cost, self.switching, self.cheaper = split_cost, switching, cheaper
        self.fixed = (fixed, fixed, fixed + fixed_of_last)
        self.random = random.Random(0)
        self.passes: list[int] = []
        self.calls: list[tuple[str, int]] = []

    @property
    def unit_count(self) -> int:
        return len(COSTS)

    @property
    def clock(self) -> CpuClock:
        return CpuClock(wall=lambda: self.wall, cpu=lambda: self.cpu)

    @property
    def kinds(self) -> list[tuple[str, int]]:
        return [call for call in self.calls if call[0] in ("split", "units", "whole")]

    def warm_up(self, batch: int, *, split: bool) -> None:
        self.begin(batch, split=split, apart=True)
        self.forward(0)

    def begin(self, batch: int, *, split: bool, apart: bool) -> None:
        self.passes.append(batch)
        self.calls.append(("split" if split else "units", batch))

    def begin_whole(self, batch: int) -> None:
        self.passes.append(batch)
        self.calls.append(("whole", batch))

    def forward_whole(self) -> None:
        for (forward, _), fixed in zip(COSTS, self.fixed, strict=True):
            self.spend(forward + fixed / self.passes[-1])

    def backward_whole(self) -> None:
        for _, backward in COSTS:
            self.spend(backward)

    def prepare(self, unit: int) -> None:
        pass

    def forward(self, unit: int) -> None:
        self.calls.append(("forward", unit))
        self.spend(COSTS[unit][0] + (self.fixed[unit] + self.switching) / self.passes[-1])

    def backward(self, unit: int) -> None:
        self.calls.append(("backward", unit))
        self.spend(COSTS[unit][1] + self.switching / self.passes[-1])

    def backward_inputs(self, unit: int) -> None:
        self.calls.append(("inputs", unit))
        self.spend(COSTS[unit][1] * (1 - WEIGHT) * (1 + self.split_cost))

    def backward_weights(self, unit: int) -> None:
        self.calls.append(("weights", unit))
        self.spend(COSTS[unit][1] * WEIGHT * (1 + self.split_cost))

    def forget(self) -> None:
        self.calls.append(("forget", self.passes[-1]))

    def spend(self, seconds_per_sample: float) -> None:
        batch = self.passes[-1]
        seconds = seconds_per_sample * batch * (1 + self.jitter * self.random.random())
        if batch >= self.cheaper[0]:
            seconds *= self.cheaper[1]
        if self.passes.count(batch) == 1:
            seconds *= self.first_pass_factor
        self.cpu += seconds
        while seconds > 0:
            # Like the kernel: run until the quota is used up, then wait for the next period.
            slice_ = min(seconds, self.share * self.period - self.in_period)
            self.wall += slice_
            self.in_period += slice_
            seconds -= slice_
            if self.share < 1 and self.in_period >= self.share * self.period - 1e-12:
                self.wall += self.period * (1 - self.share)
            if self.in_period >= self.share * self.period - 1e-12:
                self.in_period = 0.0


def timed(
    device: Device, sizes: list[int], budget_seconds: float, **limits: Any
) -> dict[int, UnitTimes]:
    return timing(device, sizes, budget_seconds, **limits).times


def timing(device: Device, sizes: list[int], budget_seconds: float, **limits: Any) -> UnitTimings:
    return time_units(device, sizes, TimingLimits(budget_seconds, **limits), device.clock)


def assert_close(times: UnitTimes, batch: int, slowdown: float, relative: float) -> None:
    for unit, (forward, backward) in enumerate(COSTS):
        assert times.forward[unit] == pytest.approx(forward * batch * slowdown, rel=relative)
        assert times.backward[unit] == pytest.approx(backward * batch * slowdown, rel=relative)
        weight = backward * batch * slowdown * WEIGHT
        assert times.weight[unit] == pytest.approx(weight, rel=relative)
        assert times.weight[unit] <= times.backward[unit]


def test_a_device_of_its_own_is_timed_exactly() -> None:
    times = timed(Device(), [1, 4, 16], 2.0)
    assert list(times) == [1, 4, 16]
    for batch in times:
        assert_close(times[batch], batch, 1.0, 1e-9)


@pytest.mark.parametrize("share", [0.2, 0.35, 0.7])
def test_a_quota_shows_in_the_scale_not_in_single_units(share: float) -> None:
    found = timing(Device(share), [1, 2, 8], 3.0)
    assert found.wall_by_cpu == pytest.approx(1 / share, rel=0.1)
    for batch, measured in found.times.items():
        assert_close(measured, batch, found.wall_by_cpu, 1e-9)


def test_sizes_that_must_be_measured_are_however_slow() -> None:
    device = Device()
    assert list(timed(device, [1, 4, 16], 0.0, every_size=True)) == [1, 4, 16]
    assert device.kinds.count(("whole", 16)) == 1
    few = timed(Device(), [1, 4, 16], 0.0, every_size=True, may_run=lambda size: size < 16)
    assert list(few) == [1, 4]


def test_the_first_pass_of_a_size_does_not_count() -> None:
    times = timed(Device(first_pass_factor=50.0), [1, 2], 5.0)
    assert_close(times[2], 2, 1.0, 1e-9)


def test_what_a_unit_costs_by_itself_beside_its_own_does_not_count() -> None:
    times = timed(Device(switching=0.0002), [4, 16, 64], 1.0)
    for batch, measured in times.items():
        assert sum(measured.forward) == pytest.approx(batch * sum(f for f, _ in COSTS), rel=1e-3)
        assert sum(measured.backward) == pytest.approx(batch * sum(b for _, b in COSTS), rel=1e-3)
        assert measured.forward[1] == pytest.approx(COSTS[1][0] * batch, rel=0.1)


def test_units_that_run_apart_are_timed_the_same() -> None:
    device = Device()
    times = timed(device, [2], 0.0, apart=lambda batch: True)
    assert_close(times[2], 2, 1.0, 1e-9)
    of_one = [call for unit in range(3) for call in [("forward", unit), ("inputs", unit)]]
    assert [call for call in device.calls[:10] if call[0] in ("forward", "inputs")] == of_one
    assert ("whole", 2) not in device.kinds


class ColdDevice(Device):
    """Of twice as many units, the first of which to run finds everything cold."""

    @property
    def unit_count(self) -> int:
        return 2 * len(COSTS)

    def forward(self, unit: int) -> None:
        if ("forward", 0) not in self.calls:
            self.spend(1.0)
        super().forward(unit % len(COSTS))

    def backward(self, unit: int) -> None:
        super().backward(unit % len(COSTS))

    def backward_inputs(self, unit: int) -> None:
        super().backward_inputs(unit % len(COSTS))

    def backward_weights(self, unit: int) -> None:
        super().backward_weights(unit % len(COSTS))


def test_what_the_one_that_runs_first_finds_cold_counts_for_no_unit() -> None:
    device = ColdDevice()
    times = timed(device, [2], 0.0, apart=lambda batch: True)
    assert times[2].forward == pytest.approx([2 * forward for forward, _ in 2 * COSTS], rel=1e-9)
    assert device.passes[:2] == [2, 2]


def test_a_pass_by_units_runs_all_forwards_in_order_then_all_backwards_in_reverse() -> None:
    device = Device()
    timed(device, [1], 0.0, most_seconds=1.0)
    forwards = [("forward", 0), ("forward", 1), ("forward", 2)]
    parts = [(part, unit) for unit in (2, 1, 0) for part in ("inputs", "weights")]
    backwards = [("backward", unit) for unit in (2, 1, 0)]
    first = [
        *[("split", 1), *forwards, *parts],
        ("whole", 1),
        *[("units", 1), *forwards, *backwards],
        ("whole", 1),
    ]
    assert device.calls[: len(first)] == first


def test_larger_sizes_are_run_less_but_each_by_units_too() -> None:
    device = Device()
    timed(device, [4, 16, 64], 0.0, most_seconds=10.0)
    once = [
        *[("split", 4), ("whole", 4), ("units", 4), ("whole", 4)],
        *[("units", 16), ("split", 16), ("whole", 16)],
        *[("units", 64), ("units", 64), ("whole", 64)],
    ]
    assert device.kinds[: len(once)] == once


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_who_needs_more_than_the_budget_goes_on_as_long_as_it_may(share: float) -> None:
    """Others still measure then, and nobody stops in training either."""
    device = Device(share)
    timed(device, [4, 16, 64], 1.0, most_seconds=5.0)
    longest = 64 * sum(map(sum, COSTS)) / share
    assert 5.0 - longest - 0.02 < device.wall <= 5.0
    quick = Device(share)
    timed(quick, [4], 1.0, most_seconds=5.0)
    assert quick.wall <= 1.0


@pytest.mark.parametrize("most_seconds", [3.0, 10.0])
def test_units_whose_part_changes_with_the_size_are_timed_at_the_largest(
    most_seconds: float,
) -> None:
    device = Device(fixed_of_last=0.01)  # which is most of 4 samples, and little of 64
    times = timed(device, [4, 16, 64], 0.0, most_seconds=most_seconds)
    for batch, measured in times.items():
        assert measured.forward[2] == pytest.approx(0.01 + COSTS[2][0] * batch, rel=1e-6)
        assert measured.forward[1] == pytest.approx(COSTS[1][0] * batch, rel=1e-6)


def test_all_kinds_of_passes_are_repeated_where_there_is_time() -> None:
    device = Device()
    timed(device, [1], 1e9)
    kinds = [kind for kind, _ in device.kinds]
    assert len(kinds) == MAXIMUM_PASSES
    assert {kind: kinds.count(kind) for kind in kinds} == {"split": 2, "whole": 4, "units": 3}


@pytest.mark.parametrize("cost", [0.0, 0.5])
def test_what_splitting_costs_does_not_count(cost: float) -> None:
    times = timed(Device(split_cost=cost), [4, 8], 2.0)
    assert_close(times[4], 4, 1.0, 1e-9)
    assert_close(times[8], 8, 1.0, 1e-9)


def test_the_smallest_size_is_measured_whatever_it_costs() -> None:
    device = Device(0.2)
    assert list(timed(device, [16, 4, 64], 0.0)) == [4]
    assert device.kinds == [("split", 4), ("whole", 4)]


def test_one_size_alone_is_followed_by_a_larger_one_even_a_little_late() -> None:
    """Most of a pass does not depend on its size: a second one shows it."""
    device = Device(0.3, fixed=0.1)  # 1.2 s for 4 samples
    found = timing(device, [4, 8, 16], 0.5, most_seconds=3.5)
    assert device.kinds == [("split", 4), ("whole", 4), ("whole", 6)]
    assert found.cold == (6,)
    assert device.wall <= 3.5 * SECOND_SIZE
    growth = sum(found.times[6].forward) / sum(found.times[4].forward)
    assert growth == pytest.approx(1 + 2 * 0.004 / 0.316, rel=0.01)
    assert found.times[6].weight[0] / found.times[6].backward[0] == pytest.approx(WEIGHT)


def test_a_second_size_that_would_be_much_too_late_is_not_begun() -> None:
    device = Device(0.3, fixed=0.1)
    assert list(timed(device, [4, 8, 16], 0.5, most_seconds=2.0)) == [4]


def test_a_second_size_goes_before_another_pass_of_the_smallest() -> None:
    device = Device(0.3, fixed=0.1)
    found = timing(device, [4, 8, 16], 0.5, most_seconds=2.5)
    assert device.kinds == [("split", 4), ("whole", 8)]
    assert found.cold == (4, 8)
    assert device.wall <= 2.5 * SECOND_SIZE


def test_a_smaller_size_is_measured_where_time_forbids_the_one_asked_for() -> None:
    device = Device(0.2)
    times = timed(device, [4, 64, 512], 0.5, most_seconds=8.0)
    assert len(times) == 2
    assert 16 <= max(times) <= 64
    assert device.wall <= 8.0 * SECOND_SIZE


@pytest.mark.parametrize("budget", [0.1, 0.5, 2.5])
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_the_budget_holds_once_the_smallest_size_fits(budget: float, share: float) -> None:
    device = Device(share, jitter=0.05)
    smallest = 4 * sum(map(sum, COSTS)) / share + 0.02
    timed(device, [1, 4, 32], budget)
    assert device.wall <= max(budget * 1.2, smallest * 1.2)


def test_time_that_larger_sizes_leave_goes_to_the_largest_that_was_measured() -> None:
    device = Device()
    timed(device, [1, 2], 9.0, may_run=lambda batch: batch < 2)
    assert device.passes == [1] * MAXIMUM_PASSES


def test_a_size_that_may_not_run_ends_the_series() -> None:
    assert list(timed(Device(), [1, 2, 4], 9.0, may_run=lambda b: b < 2)) == [1]


def test_sizes_are_measured_once_and_ascending() -> None:
    assert list(timed(Device(), [4, 1, 4], 9.0)) == [1, 4]


def test_a_slow_device_takes_longer_for_larger_sizes() -> None:
    device = Device(0.2)
    assert list(timed(device, [1, 4, 16], 0.2)) == [1]
    device = Device(0.2)
    assert list(timed(device, [1, 4, 16], 0.2, most_seconds=4.0)) == [1, 4, 16]
    assert device.passes.count(16) == 3
    assert device.wall <= 4.0


def test_where_only_one_pass_fits_it_counts() -> None:
    device = Device(0.2)
    times = timed(device, [4, 8, 32], 0.0, most_seconds=3.0)
    largest = max(times)
    assert largest > 8
    assert device.passes.count(largest) == 1
    assert_close(times[largest], largest, 5.0, 0.1)
    assert device.wall <= 3.0


def test_what_a_pass_costs_at_any_size_keeps_no_larger_size_from_being_measured() -> None:
    device = Device(0.3, fixed=0.05)  # 0.7 s for 4 samples, but 2.9 s for 64
    times = timed(device, [4, 16, 64], 0.5, most_seconds=20.0)
    assert len(times) == 3
    assert max(times) == 64
    assert device.wall <= 20.0


@pytest.mark.parametrize("fixed", [0.0, 0.01, 0.04])
@pytest.mark.parametrize("most_seconds", [2.0, 2.5, 3.0, 3.5, 4.0, 5.0])
def test_the_largest_size_is_run_once_only_where_a_second_pass_does_not_fit(
    fixed: float, most_seconds: float
) -> None:
    device = Device(0.3, fixed=fixed)
    found = timing(device, [4, 16, 64], 0.0, most_seconds=most_seconds)
    largest = max(device.passes)
    if device.passes.count(largest) == 1:
        assert largest in found.cold
        times = found.times[largest]
        a_pass = sum(times.forward) + sum(times.backward)
        assert device.wall + a_pass > most_seconds - 0.02


def test_a_slow_device_comes_to_a_size_between_warm_or_to_a_large_one() -> None:
    """Who goes on to the next size runs a large one once, and that takes longer than it will."""

    def found(most_seconds: float, *, largest_second: bool) -> UnitTimings:
        device = Device(share=0.3, first_pass_factor=1.5, fixed=0.01)
        limits = TimingLimits(0.5, most_seconds, largest_second=largest_second)
        return time_units(device, [4, 16, 64], limits, device.clock)

    up, down = (found(5.0, largest_second=second) for second in (False, True))
    assert (list(up.times), up.cold) == ([4, 9, 36], (36,))
    assert (list(down.times), down.cold) == ([4, 36], ())
    ample = found(12.0, largest_second=True)
    assert (list(ample.times), ample.cold) == ([4, 16, 48], ())


@pytest.mark.parametrize(("share", "largest_second"), [(0.3, False), (0.5, True)])
def test_who_has_two_warm_sizes_ends_when_it_has_taken_enough(
    share: float, largest_second: bool
) -> None:
    def found(enough_seconds: float) -> tuple[UnitTimings, float]:
        device = Device(share=share, first_pass_factor=1.5, fixed=0.01)
        limits = TimingLimits(0.5, 7.0, enough_seconds, largest_second=largest_second)
        return time_units(device, [4, 16, 64], limits, device.clock), device.wall

    (short, soon), (long, late) = found(4.0), found(inf)
    assert len(short.times) >= 2
    assert short.cold == ()
    assert soon <= 5.0 < 6.0 < late
    assert max(short.times) < max(long.times)
    assert not largest_second or max(short.times) >= 32


@pytest.mark.parametrize(("share", "largest_second"), [(0.1, False), (0.2, True), (0.3, True)])
def test_who_has_only_one_size_by_then_takes_the_time_for_a_second(
    share: float, largest_second: bool
) -> None:
    device = Device(share=share, first_pass_factor=1.5, fixed=0.01)
    limits = TimingLimits(0.5, 7.0, enough_seconds=2.0, largest_second=largest_second)
    found = time_units(device, [4, 16, 64], limits, device.clock)
    assert len(found.times) == 2
    assert 2.0 < device.wall < 7.5


def test_one_size_is_measured_once_in_either_order() -> None:
    for share in (1.0, 0.1):
        up, down = (
            timed(Device(share=share), [1], 2.0, most_seconds=7.0, largest_second=second)
            for second in (False, True)
        )
        assert list(down) == [1]
        assert down == up


def test_a_quick_device_measures_all_in_either_order() -> None:
    for largest_second in (False, True):
        device = Device(first_pass_factor=2.0)
        times = timed(device, [4, 16, 64], 8.0, largest_second=largest_second)
        assert list(times) == [4, 16, 64]
        for batch in times:
            assert_close(times[batch], batch, 1.0, 1e-9)


def test_a_size_that_was_run_once_tells_nothing_between_others() -> None:
    passes = {4: 3, 8: 1, 16: 1, 32: 2, 64: 1}
    sizes = [BatchPasses(size, whole=[WholePass(1.0, 1.0, 2.0)] * n) for size, n in passes.items()]
    assert [size.batch for size in informative_passes(sizes)] == [4, 32, 64]
    assert informative_passes(sizes[1:3]) == sizes[1:3]


GAINING = (16, 0.5)


def test_a_slow_device_comes_to_the_size_from_which_samples_are_cheaper() -> None:
    allowed = {"most_seconds": 1.5, "enough_seconds": 1.2}
    for largest_second in (False, True):
        device = Device(share=0.2, first_pass_factor=1.5, cheaper=GAINING)
        found = timing(
            device, [4, 16, 64], 0.4, largest_second=largest_second, cheaper_from=16, **allowed
        )
        unknowing = timing(
            Device(share=0.2, first_pass_factor=1.5, cheaper=GAINING),
            *([4, 16, 64], 0.4),
            largest_second=largest_second,
            **allowed,
        )
        assert max(found.times) >= 16
        assert any(size >= 16 and size not in found.cold for size in found.times)
        assert not set(found.times) & set(range(5, 16)), "that would tell nothing of larger ones"
        assert found.times.keys() != unknowing.times.keys() or found.cold != unknowing.cold


def test_a_second_pass_of_the_only_size_beyond_the_gain_may_come_a_little_late() -> None:
    device = Device(share=0.2, first_pass_factor=1.2, cheaper=GAINING)
    found = timing(
        *(device, [4, 16, 64], 0.2), most_seconds=1.1, enough_seconds=0.9, cheaper_from=16
    )
    assert device.kinds == [("split", 4), ("whole", 4), ("whole", 16), ("whole", 16)]
    assert found.cold == ()
    assert 1.1 < device.wall <= SECOND_SIZE * 1.1


def test_what_a_size_that_must_run_apart_costs_ends_no_smaller_one() -> None:
    device = Device(share=0.2)
    found = timed(device, [4, 64], 4.0, largest_second=True, apart=lambda batch: batch > 32)
    assert list(found) == [4, 27]
    assert ("whole", 27) in device.kinds


def test_an_accelerator_s_times_settle_before_any_counts() -> None:
    class Rising(Device):
        """Its clock rises with each of the first passes."""

        def spend(self, seconds_per_sample: float) -> None:
            super().spend(seconds_per_sample * (1 + 2 * 0.5 ** len(self.passes)))

    cold, settled = (
        timed(Rising(), [1], 0.0, settle_seconds=seconds)[1].forward[0] for seconds in (0.0, 1.0)
    )
    assert settled == pytest.approx(COSTS[0][0], rel=0.1)
    assert cold > 1.2 * settled


def test_the_largest_size_that_memory_holds_is_the_last() -> None:
    class Small(Device):
        def forward(self, unit: int) -> None:
            if self.passes[-1] > 8:
                raise MemoryError
            super().forward(unit)

    device = Small()
    found = timed(device, [1, 4, 8, 16, 32], 5.0, is_too_large=lambda e: isinstance(e, MemoryError))
    assert sorted(found) == [1, 4, 8]
    assert ("forget", 16) in device.calls
    assert 32 not in device.passes
    with pytest.raises(MemoryError):
        timed(Small(), [1, 16], 5.0)
