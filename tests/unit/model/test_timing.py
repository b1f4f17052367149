from __future__ import annotations

import random

import pytest

from p2ptrain.model.timing import MAXIMUM_PASSES, Clock, UnitTimes, time_units

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
        fixed: CPU seconds of a forward or a backward beside those of its samples.
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
    ) -> None:
        self.wall = self.cpu = self.in_period = 0.0
        self.share, self.period = share, period
        self.first_pass_factor, self.jitter = first_pass_factor, jitter
        self.split_cost, self.fixed = split_cost, fixed
        self.random = random.Random(0)
        self.passes: list[int] = []
        self.calls: list[tuple[str, int]] = []

    @property
    def unit_count(self) -> int:
        return len(COSTS)

    @property
    def clock(self) -> Clock:
        return Clock(wall=lambda: self.wall, cpu=lambda: self.cpu)

    def begin(self, batch: int, *, split: bool, apart: bool) -> None:
        self.passes.append(batch)
        self.calls.append(("split" if split else "whole", batch))

    def prepare(self, unit: int) -> None:
        pass

    def forward(self, unit: int) -> None:
        self.calls.append(("forward", unit))
        self._spend(COSTS[unit][0] + self.fixed / self.passes[-1])

    def backward(self, unit: int) -> None:
        self.calls.append(("backward", unit))
        self._spend(COSTS[unit][1])

    def backward_inputs(self, unit: int) -> None:
        self.calls.append(("inputs", unit))
        self._spend(COSTS[unit][1] * (1 - WEIGHT) * (1 + self.split_cost))

    def backward_weights(self, unit: int) -> None:
        self.calls.append(("weights", unit))
        self._spend(COSTS[unit][1] * WEIGHT * (1 + self.split_cost))

    def _spend(self, seconds_per_sample: float) -> None:
        batch = self.passes[-1]
        seconds = seconds_per_sample * batch * (1 + self.jitter * self.random.random())
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


def assert_close(times: UnitTimes, batch: int, slowdown: float, relative: float) -> None:
    for unit, (forward, backward) in enumerate(COSTS):
        assert times.forward[unit] == pytest.approx(forward * batch * slowdown, rel=relative)
        assert times.backward[unit] == pytest.approx(backward * batch * slowdown, rel=relative)
        weight = backward * batch * slowdown * WEIGHT
        assert times.weight[unit] == pytest.approx(weight, rel=relative)
        assert times.weight[unit] <= times.backward[unit]


def test_a_device_of_its_own_is_timed_exactly() -> None:
    device = Device()
    times = time_units(device, [1, 4], 2.0, clock=device.clock)
    assert list(times) == [1, 4]
    assert_close(times[1], 1, 1.0, 1e-9)
    assert_close(times[4], 4, 1.0, 1e-9)


@pytest.mark.parametrize("share", [0.2, 0.35, 0.7])
def test_a_quota_shows_in_the_scale_not_in_single_units(share: float) -> None:
    device = Device(share)
    times = time_units(device, [1, 2, 8], 3.0, clock=device.clock)
    for batch, measured in times.items():
        assert_close(measured, batch, 1 / share, 0.1)


def test_the_first_pass_of_a_size_does_not_count() -> None:
    device = Device(first_pass_factor=50.0)
    times = time_units(device, [1, 2], 5.0, clock=device.clock)
    assert_close(times[2], 2, 1.0, 1e-9)


def test_units_that_run_apart_are_timed_the_same() -> None:
    device = Device()
    times = time_units(device, [2], 0.0, clock=device.clock, apart=lambda batch: True)
    assert_close(times[2], 2, 1.0, 1e-9)
    of_one = [call for unit in range(3) for call in [("forward", unit), ("inputs", unit)]]
    assert [call for call in device.calls[:10] if call[0] in ("forward", "inputs")] == of_one


def test_a_pass_runs_all_forwards_in_order_then_all_backwards_in_reverse() -> None:
    device = Device()
    time_units(device, [1], 0.0, clock=device.clock)
    forwards = [("forward", 0), ("forward", 1), ("forward", 2)]
    backwards = [(part, unit) for unit in (2, 1, 0) for part in ("inputs", "weights")]
    assert device.calls == [("split", 1), *forwards, *backwards] * 2


def test_split_and_whole_passes_take_turns() -> None:
    device = Device()
    time_units(device, [1], 1e9, clock=device.clock)
    kinds = [kind for kind, _ in device.calls if kind in ("split", "whole")]
    assert kinds == ["split"] + ["split", "whole"] * (MAXIMUM_PASSES // 2) + ["split"]


@pytest.mark.parametrize("cost", [0.0, 0.5])
def test_what_splitting_costs_does_not_count(cost: float) -> None:
    device = Device(split_cost=cost)
    assert_close(time_units(device, [4], 2.0, clock=device.clock)[4], 4, 1.0, 1e-9)


def test_the_smallest_size_is_measured_whatever_it_costs() -> None:
    device = Device(0.2)
    assert list(time_units(device, [16, 4, 64], 0.0, clock=device.clock)) == [4]
    assert device.passes == [4, 4]


def test_a_size_that_would_exceed_the_budget_is_left_out() -> None:
    device = Device()
    times = time_units(device, [1, 8, 64, 512], 2.5, clock=device.clock)
    assert list(times) == [1, 8, 64]
    assert device.wall <= 2.5


@pytest.mark.parametrize("budget", [0.1, 0.5, 2.5])
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_the_budget_holds_once_the_smallest_size_fits(budget: float, share: float) -> None:
    device = Device(share, jitter=0.05)
    smallest = 2 * sum(map(sum, COSTS)) / share + 0.02
    time_units(device, [1, 2, 4, 8, 16, 32], budget, clock=device.clock)
    assert device.wall <= max(budget * 1.2, smallest * 1.2)


def test_time_that_a_left_out_size_leaves_goes_to_the_one_before() -> None:
    device = Device()
    one = sum(map(sum, COSTS))
    assert list(time_units(device, [1, 100], 8.5 * one, clock=device.clock)) == [1]
    assert device.passes == [1] * 8


def test_passes_are_bounded() -> None:
    device = Device()
    time_units(device, [1], 1e9, clock=device.clock)
    assert len(device.passes) == 1 + MAXIMUM_PASSES


def test_a_size_that_may_not_run_ends_the_series() -> None:
    device = Device()
    times = time_units(device, [1, 2, 4], 9.0, clock=device.clock, may_run=lambda b: b < 2)
    assert list(times) == [1]


def test_sizes_are_measured_once_and_ascending() -> None:
    device = Device()
    assert list(time_units(device, [4, 1, 4], 9.0, clock=device.clock)) == [1, 4]


def test_a_slow_device_takes_longer_for_larger_sizes_but_repeats_nothing() -> None:
    device = Device(0.2)
    assert list(time_units(device, [1, 4, 16], 0.5, clock=device.clock)) == [1]
    device = Device(0.2)
    times = time_units(device, [1, 4, 16, 64], 0.5, most_seconds=4.0, clock=device.clock)
    assert list(times) == [1, 4, 16]
    assert device.passes.count(16) == 2
    assert device.wall <= 4.0


def test_what_a_pass_costs_at_any_size_keeps_no_larger_size_from_being_measured() -> None:
    device = Device(0.3, fixed=0.05)  # 1.1 s for 16 samples, but 2.7 s for 64
    times = time_units(device, [4, 16, 64], 0.5, most_seconds=9.0, clock=device.clock)
    assert list(times) == [4, 16, 64]
    assert device.wall <= 9.0
