"""What a device says of its state, and when it is worth a message to all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.manners.condition import (
    USUAL_SAYING,
    DeviceCondition,
    MemoryInUse,
    Work,
    is_worth_saying,
    rests,
)

ON_BATTERY = DeviceCondition(
    *(Work.PAUSED, "paused: on battery"),
    others_cpu_percent=12,
    battery_percent=80,
    power="battery",
    memory=MemoryInUse(1 << 30),
)


def test_it_stands_among_what_a_member_says_of_itself() -> None:
    info = {"threads": 4, **ON_BATTERY.to_info()}
    assert DeviceCondition.of_info(info) == ON_BATTERY
    assert rests(info)
    assert DeviceCondition().to_info() == {}
    assert not rests({})


@pytest.mark.parametrize("wrong", [{"work": "lazy"}, {"battery_percent": 300}, {"sentence": 1}])
def test_of_a_member_that_says_nonsense_nothing_is_known(wrong: dict[str, object]) -> None:
    assert DeviceCondition.of_info({"threads": 4, **wrong}) == DeviceCondition()


def test_what_it_does_is_said_at_once_and_numbers_when_they_have_moved() -> None:
    def is_said(now: DeviceCondition, seconds_ago: float) -> bool:
        return is_worth_saying(ON_BATTERY, now, seconds_ago, USUAL_SAYING)

    assert is_said(replace(ON_BATTERY, work=Work.SLOW, sentence="slow: on battery"), 0.0)
    assert is_said(replace(ON_BATTERY, power="mains"), 0.0)
    assert not is_said(replace(ON_BATTERY, others_cpu_percent=90), 14.0)
    assert is_said(replace(ON_BATTERY, others_cpu_percent=90), 15.0)
    assert not is_said(replace(ON_BATTERY, others_cpu_percent=20, battery_percent=75), 60.0)
    assert is_said(replace(ON_BATTERY, temperature_c=60), 60.0)
    assert not is_said(replace(ON_BATTERY, memory=MemoryInUse((1 << 30) + (1 << 20))), 60.0)
    assert not is_said(replace(ON_BATTERY, memory=MemoryInUse(1 << 20)), 14.0)
    assert is_said(replace(ON_BATTERY, memory=MemoryInUse(1 << 20)), 60.0)
    assert not is_said(ON_BATTERY, 3600.0)
