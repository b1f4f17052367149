"""Which version each forward and backward uses: the rule against the schedule that gives it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import OptionError, ProtocolError
from p2ptrain.job.asynchrony import AsyncOptions, WeightDelays
from p2ptrain.net.forms import write_form
from p2ptrain.net.read_form import read_form
from p2ptrain.plan.types.schedule import one_f_one_b
from p2ptrain.plan.types.weight_versions import Weights, depths_of, versions_kept
from tests.support.schedule_deadlock import find_deadlock

PIPELINES = st.integers(1, 6)
STARTS = st.integers(0, 50)


def straight(stages: int) -> tuple[int, ...]:
    """Depths of single devices."""
    return depths_of([1] * stages)


@dataclass
class Stage:
    """One that does what its order says, and keeps what the rule asks for."""

    delays: WeightDelays
    index: int
    updates: int
    kept: set[int] = field(default_factory=set)
    seen: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kept = {self.updates}

    def forward(self, step: int) -> None:
        version = self.delays.seen(self.index, step)
        assert version in self.kept, "it must not be forgotten before it is used"
        self.seen[step] = version

    def backward(self, step: int) -> None:
        assert step == self.updates
        version = self.seen.pop(step)
        assert version == self.delays.seen(self.index, step)
        assert version in self.kept or self.delays.how.weights is Weights.UNSTASHED
        self.updates += 1
        oldest = self.delays.oldest(self.index, self.updates)
        self.kept = {v for v in self.kept if v >= oldest} | {self.updates}
        assert set(self.delays.averaged(self.index, self.updates)) <= self.kept


def run(delays: WeightDelays, stage: int, count: int) -> Iterator[Stage]:
    """The stage after each action of `count` mini-batches, or of as many as its depth asks for."""
    depth = delays.depths[stage]
    running = Stage(delays, stage, delays.start)
    for action in one_f_one_b(max(count, depth), depth):
        step = delays.start + action.micro_batch
        running.forward(step) if action.kind == "forward" else running.backward(step)
        yield running


@given(PIPELINES, STARTS, st.integers(1, 30))
def test_stashed_weights_are_the_newest_at_each_forward(n: int, start: int, count: int) -> None:
    """The formula is what the schedule gives by itself: nothing has to be waited for."""
    delays = WeightDelays(AsyncOptions(), straight(n), start)
    for stage in range(n):
        newest: dict[int, int] = {}
        for running in run(delays, stage, count):
            for step, version in running.seen.items():
                newest.setdefault(step, running.updates)
                assert version == newest[step] == max(start, step - (n - 1 - stage))


@given(PIPELINES, STARTS, st.integers(1, 30), st.sampled_from(Weights), st.integers(1, 4))
def test_no_stage_keeps_more_than_it_says(
    n: int, start: int, count: int, weights: Weights, k: int
) -> None:
    if weights is Weights.DOUBLE:
        return  # divides mini-batches: `test_two_versions_are_enough_for_divided_mini_batches`
    averages = weights in (Weights.STASHED, Weights.VERTICAL)
    delays = WeightDelays(AsyncOptions(weights, k if averages else None), straight(n), start)
    for stage in range(n):
        most = max(len(running.kept) for running in run(delays, stage, count))
        assert most <= versions_kept(weights, n - stage, n)
        if count >= 2 * n:
            assert most == versions_kept(weights, n - stage, n)


@given(PIPELINES, st.integers(0, 4), st.integers(1, 10))
def test_two_versions_are_enough_for_divided_mini_batches(n: int, more: int, count: int) -> None:
    pieces = n + more
    delays = WeightDelays(AsyncOptions(Weights.DOUBLE), straight(n), 0)
    for stage in range(n):
        kept, updates = {0}, 0
        for action in one_f_one_b(count * pieces, delays.depths[stage]):
            step, piece = divmod(action.micro_batch, pieces)
            assert delays.seen(stage, step) in kept
            if action.kind == "backward" and piece == pieces - 1:
                updates += 1
                oldest = delays.oldest(stage, updates)
                kept = {v for v in kept if v >= oldest} | {updates}
            assert len(kept) <= versions_kept(Weights.DOUBLE, n - stage, n)


@given(PIPELINES, st.integers(1, 30))
def test_the_stages_never_wait_for_each_other_in_a_circle(n: int, count: int) -> None:
    orders = [one_f_one_b(max(count, n), n - stage) for stage in range(n)]
    assert find_deadlock(orders) == ()


@given(PIPELINES, STARTS, st.integers(0, 60))
def test_with_vertical_sync_all_stages_see_one_version(n: int, start: int, made: int) -> None:
    delays = WeightDelays(AsyncOptions(Weights.VERTICAL), straight(n), start)
    step = start + made
    assert {delays.seen(stage, step) for stage in range(n)} == {max(start, step - (n - 1))}


def test_the_mean_is_of_the_versions_that_a_stage_keeps_anyway() -> None:
    """FTPipeHD's example: three devices, k = 1: after 3 updates of stage 0 versions 1, 2, 3."""
    delays = WeightDelays(AsyncOptions(aggregate=1), straight(3), 0)
    assert [list(delays.averaged(0, u)) for u in range(1, 7)] == [
        [],
        [],
        [1, 2, 3],
        [],
        [],
        [4, 5, 6],
    ]
    assert [list(delays.averaged(1, u)) for u in range(1, 5)] == [[], [1, 2], [], [3, 4]]
    assert not any(delays.averaged(2, u) for u in range(1, 10)), "the last stage has one version"
    assert list(WeightDelays(AsyncOptions(aggregate=2), straight(3), 10).averaged(0, 16)) == [
        14,
        15,
        16,
    ]
    assert not WeightDelays(AsyncOptions(aggregate=2), straight(3), 10).averaged(0, 12), (
        "counted from the start"
    )


@pytest.mark.parametrize(
    "how", [AsyncOptions(), AsyncOptions(Weights.VERTICAL, 3), AsyncOptions(Weights.UNSTASHED)]
)
def test_it_travels(how: AsyncOptions) -> None:
    assert read_form(AsyncOptions, write_form(how), "how") == how


@pytest.mark.parametrize(
    "value",
    [
        7,
        {"weights": "old", "aggregate": None},
        {"weights": "stashed", "aggregate": "1"},
        {"weights": "stashed", "aggregate": 0},
        {"weights": "double", "aggregate": 2},
    ],
)
def test_what_is_none_of_it_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError):
        read_form(AsyncOptions, value, "how")


def test_choices_that_exclude_each_other() -> None:
    with pytest.raises(OptionError, match="not kept with unstashed weights"):
        AsyncOptions(Weights.UNSTASHED, 1)
    with pytest.raises(OptionError, match="1 or more"):
        AsyncOptions(aggregate=0)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), STARTS, st.integers(1, 30))
def test_devices_that_take_turns_make_a_stage_deeper(
    devices: list[int], start: int, count: int
) -> None:
    """Its depth is its own devices and all later ones, and a mini-batch sees so much less."""
    delays = WeightDelays(AsyncOptions(), depths_of(devices), start)
    for stage in range(len(devices)):
        depth = sum(devices[stage:])
        for running in run(delays, stage, count):
            for step, version in running.seen.items():
                assert version == max(start, step - depth + 1)
    orders = [one_f_one_b(max(count, depth), depth) for depth in delays.depths]
    assert find_deadlock(orders[:1]) == ()
