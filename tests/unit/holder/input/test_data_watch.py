"""Data that is slower than training is named; data that is only read ahead is not."""

from __future__ import annotations

import pytest

from p2ptrain.holder.input.data_watch import DataWatch


def watched(steps: int, *, seconds: float, waited: float, busy: float) -> DataWatch:
    watch = DataWatch()
    for _ in range(steps):
        watch.waited(waited)
        watch.stepped(seconds, busy)
    return watch


def test_the_share_of_the_time_that_was_lost() -> None:
    assert watched(10, seconds=2.0, waited=1.9, busy=1.2).share() == pytest.approx(0.4)


def test_waiting_beside_computing_loses_nothing() -> None:
    assert watched(10, seconds=2.0, waited=1.9, busy=1.9).share() is None


def test_devices_that_wait_for_each_other_do_not_wait_for_data() -> None:
    assert watched(10, seconds=2.0, waited=0.1, busy=0.5).share() is None


@pytest.mark.parametrize(("steps", "seconds"), [(3, 20.0), (100, 0.05)])
def test_little_is_said_of_little(steps: int, seconds: float) -> None:
    assert watched(steps, seconds=seconds, waited=seconds, busy=0.0).share() is None


def test_as_many_workers_as_read_fast_enough() -> None:
    assert DataWatch().workers(0, 0.75, processors=8) == 4
    assert DataWatch().workers(2, 0.5, processors=8) == 4
    assert DataWatch().workers(1, 0.99, processors=4) == 4
    assert DataWatch().workers(6, 0.5, processors=4) == 6
