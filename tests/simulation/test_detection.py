"""Failures are declared in time, freezes never: a sample; the tool measures thousands."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from p2ptrain.mesh.membership.membership_config import HOME_LAN, MembershipConfig
from tests.simulation.crowd import measure_crowd
from tests.simulation.detection import (
    Failure,
    measure_detection,
    measure_freeze_on_a_slow_cable,
    measure_freezes,
    measure_slow_cable,
)
from tests.simulation.device import Build


@pytest.mark.parametrize("devices", [2, 3, 5, 8])
@pytest.mark.parametrize("failure", [Failure.FREEZE, Failure.POWER_OFF])
def test_silence_is_declared_dead_within_five_seconds(devices: int, failure: Failure) -> None:
    seconds = sorted(measure_detection(seed, devices, failure).last_seconds for seed in range(5))
    assert seconds[2] <= 3.0
    assert seconds[-1] <= 4.2


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_a_killed_process_is_declared_dead_at_once(devices: int) -> None:
    for seed in range(5):
        assert measure_detection(seed, devices, Failure.KILL).last_seconds < 0.25


def test_freezes_of_two_seconds_kill_no_device() -> None:
    results = [measure_freezes(s, devices, 8) for s in range(2) for devices in (3, 4, 8)]
    assert sum(result.anomalies for result in results) > 60
    assert not any(result.false_deaths for result in results)


def test_without_local_health_freezes_do_kill() -> None:
    build = Build(membership_config=MembershipConfig(local_health=False))
    assert any(measure_freezes(seed, 4, 8, build).false_deaths for seed in range(4))


@pytest.mark.parametrize("devices", [2, 3, 5])
def test_a_full_cable_a_hundred_times_slower_than_before_kills_no_device(devices: int) -> None:
    assert [measure_slow_cable(seed, devices) for seed in range(3)] == [()] * 3


@pytest.mark.parametrize(("devices", "seeds"), [(3, range(3)), (5, range(3)), (8, range(1, 3))])
def test_a_cable_that_loses_words_too_kills_no_device(devices: int, seeds: Sequence[int]) -> None:
    """What is said after a lost word waits until that has been sent again, seconds later."""
    assert [measure_slow_cable(seed, devices, loses=True) for seed in seeds] == [()] * len(seeds)


@pytest.mark.parametrize(("devices", "seeds"), [(4, range(3)), (8, range(2))])
def test_two_neighbours_whose_cables_become_slow_at_once_are_not_dead(
    devices: int, seeds: Sequence[int]
) -> None:
    """Only the second gets data from the first, and nobody hears it say so."""
    assert [measure_slow_cable(seed, devices, cables=2) for seed in seeds] == [()] * len(seeds)


@pytest.mark.parametrize("devices", [2, 3, 5])
def test_a_device_frozen_behind_such_a_cable_is_found(devices: int) -> None:
    """What its kernel still sends, and the data that waits, puts it off, though not for ever."""
    seconds = [measure_freeze_on_a_slow_cable(seed, devices) for seed in range(4)]
    assert max(seconds) <= 0.5 + HOME_LAN.excuse_seconds + 5.0


def test_what_a_member_sends_does_not_grow_with_the_crowd() -> None:
    small, large = (measure_crowd(0, count, quiet_seconds=4.0) for count in (30, 150))
    assert large.quiet == pytest.approx(small.quiet, rel=0.1)
    assert max(small.agreed_seconds, large.agreed_seconds) <= 10.0
