from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.planners.group_shares import BLOCKS, Rows, SampleTimes, blocks, divide
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from tests.support import planning_examples
from tests.support.thorough import examples_of


def model(*slowdowns: float) -> CostModel:
    """Two units of a second each way per sample, on devices a, b, c ..."""
    names = [chr(ord("a") + i) for i in range(len(slowdowns))]
    devices = tuple(
        ClusterDevice(name, planning_examples.PLENTY, slowdown, holder=name == "a")
        for name, slowdown in zip(names, slowdowns, strict=True)
    )
    return CostModel(
        planning_examples.profile([(1.0, 1.0)] * 2), Cluster(devices, planning_examples.FREE)
    )


def shares(
    cost: CostModel, samples: int, room: Sequence[int], *, every_device: bool = True
) -> list[int]:
    """Algorithm 1 on all devices for the whole model."""
    rows = Rows(np.arange(len(room))[None, :], np.array([0]), np.array([cost.unit_count]))
    times = SampleTimes(cost, samples)
    found = divide(times, rows, samples, np.array([room]), every_device=every_device)
    assert (found.samples.sum() == 0) == math.isinf(found.forward[0])
    return [int(share) for share in found.samples[0]]


def test_parts_follow_capacity() -> None:
    assert shares(model(1.0, 3.0, 3.0), 10, (10, 10, 10)) == [6, 2, 2]


def test_what_memory_refuses_is_divided_again() -> None:
    # The docstring's example: 6 2 2 are wanted, 4 2 2 fit, the two left go to those with room.
    assert shares(model(1.0, 3.0, 3.0), 10, (4, 10, 10)) == [4, 3, 3]


def test_too_little_memory_is_impossible() -> None:
    assert shares(model(1.0, 1.0), 10, (5, 4)) == [0, 0]
    assert shares(model(1.0, 1.0), 10, (5, 5)) == [5, 5]


def test_a_slow_device_has_a_sample_all_the_same() -> None:
    assert shares(model(1.0, 1.0, 1000.0), 4, (4, 4, 4)) == [1, 2, 1]
    assert shares(model(1.0, 1.0, 1000.0), 2, (4, 4, 4)) == [0, 0, 0]


def test_a_device_without_room_has_none_if_that_is_allowed() -> None:
    assert shares(model(1.0, 1.0), 4, (4, 0)) == [0, 0]
    assert shares(model(1.0, 1.0), 4, (4, 0), every_device=False) == [4, 0]


def test_samples_move_on_where_capacity_at_the_whole_micro_batch_misleads() -> None:
    """Equal at 8 samples, but b is slow with few: 4 and 4 take 8 s and 10.3 s, 5 and 3 10 s."""
    few = TimeTable((1, 8), (UnitTimes((1.5,) * 2, (1.5,) * 2), UnitTimes((4.0,) * 2, (4.0,) * 2)))
    linear = TimeTable((1,), (UnitTimes((0.5,) * 2, (0.5,) * 2),))
    devices = ClusterDevice("a", 10, holder=True, times=linear), ClusterDevice("b", 10, times=few)
    cost = CostModel(
        planning_examples.profile([(1.0, 1.0)] * 2), Cluster(devices, planning_examples.FREE)
    )
    seconds = [sum(cost.stage_seconds(d, 0, 2, n)) for d, n in ((0, 4), (1, 4), (0, 5), (1, 3))]
    assert seconds == pytest.approx([8.0, 10.286, 10.0, 8.857], abs=1e-3)
    assert shares(cost, 8, (8, 8)) == [5, 3]


@pytest.mark.parametrize("samples", [2000, 10**6, 10**12])
def test_many_samples_are_divided_as_few_are(samples: int) -> None:
    """A table by the number of samples would be of terabytes."""
    found = shares(model(1.0, 3.0), samples, (samples, samples))
    assert sum(found) == samples
    assert found[0] == pytest.approx(0.75 * samples, rel=1e-3)


def test_blocks_become_smaller_step_by_step() -> None:
    """From 10^12 / 32 to 1 at once some of 3·10^10 samples would move one by one."""
    assert blocks(70) == [2, 1]
    assert blocks(1024) == [32, 1]
    steps = blocks(10**12)
    assert steps[-1] == 1
    assert all(large <= 2 * BLOCKS * small for large, small in pairwise(steps))


@settings(max_examples=examples_of(10), deadline=None, derandomize=True)
@given(planning_examples.profiles(), planning_examples.clusters(), st.integers(1, 20), st.data())
def test_times_are_the_cost_models(
    profile: Profile, cluster: Cluster, samples: int, data: st.DataObject
) -> None:
    cost = CostModel(profile, cluster)
    device = data.draw(st.integers(0, len(cost.devices) - 1))
    first = data.draw(st.integers(0, cost.unit_count - 1))
    end = data.draw(st.integers(first + 1, cost.unit_count))
    times, rows = SampleTimes(cost, 20), Rows(*map(np.array, ([[device]], [first], [end])))
    found = [
        times.forward(rows, np.array([[samples]])),
        times.backward(rows, np.array([[samples]])),
    ]
    assert [float(each[0, 0]) for each in found] == pytest.approx(
        cost.stage_seconds(device, first, end, samples)
    )


def reference(cost: CostModel, samples: int, room: Sequence[int]) -> list[int] | None:
    """Algorithm 1 line by line, for one group on the whole model."""
    count = len(room)
    room = [min(most, samples) for most in room]
    if min(room) < 1 or sum(room) < samples or count > samples:
        return None

    def seconds(device: int, share: int) -> float:
        return sum(cost.stage_seconds(device, 0, cost.unit_count, share))

    speed = [1 / seconds(d, samples) for d in range(count)]
    taken, left = [0] * count, samples
    while left:
        free = [d for d in range(count) if room[d] > taken[d]]
        parts = {d: speed[d] / sum(speed[e] for e in free) * left for d in free}
        more = {d: min(int(parts[d] + 1e-9), room[d] - taken[d]) for d in free}
        if not any(more.values()):
            ranked = sorted(free, key=lambda d: (-parts[d], d))
            more = dict.fromkeys(ranked[:left], 1)
        for d, samples_more in more.items():
            taken[d] += samples_more
        left -= sum(more.values())
    while 0 in taken:
        taken[taken.index(max(taken))] -= 1
        taken[taken.index(0)] += 1
    for block in dict.fromkeys((max(1, samples // BLOCKS), 1)):
        while (moved := _moved(taken, room, block, seconds)) is not None:
            taken = moved
    return taken


def _moved(
    taken: list[int], room: Sequence[int], block: int, seconds: Callable[[int, int], float]
) -> list[int] | None:
    times = [seconds(d, share) for d, share in enumerate(taken)]
    slow = times.index(max(times))
    free = [d for d in range(len(taken)) if d != slow and room[d] - taken[d] >= block]
    if not free or taken[slow] <= block:
        return None
    fast = min(free, key=lambda d: (times[d], d))
    after = list(taken)
    after[slow] -= block
    after[fast] += block
    slowest = max(seconds(d, share) for d, share in enumerate(after))
    return after if slowest < max(times) * (1 - 1e-12) else None


@settings(max_examples=examples_of(18), deadline=None, derandomize=True)
@given(
    planning_examples.profiles(most_units=3),
    planning_examples.clusters(most_devices=4, tight=False),
    st.sampled_from([1, 3, 8, 70]),
    st.lists(st.integers(0, 40), min_size=4, max_size=4),
)
def test_many_rows_at_once_give_what_the_algorithm_gives_line_by_line(
    profile: Profile, cluster: Cluster, samples: int, room: list[int]
) -> None:
    cost = CostModel(profile, cluster)
    expected = reference(cost, samples, room[: len(cost.devices)])
    found = shares(cost, samples, room[: len(cost.devices)])
    assert found == (expected or [0] * len(cost.devices))
