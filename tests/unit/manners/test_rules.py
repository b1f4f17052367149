"""What a device decides for its person, and that it does not change its mind all the time."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.manners.condition import Work
from p2ptrain.manners.readings import DeviceReading
from p2ptrain.manners.rules import USUAL_LIMITS, Decision, LatchTimes, MannersRules
from p2ptrain.manners.settings import Manners, QuietHours

CALM = DeviceReading(others_cpu=0.0, on_battery=False, temperature_c=50.0, available_bytes=4 << 30)
NOON = 12 * 60.0


class Device:
    """Its rules, and a clock that goes on by a second at each reading."""

    def __init__(self, manners: Manners, **more: float) -> None:
        self.rules = MannersRules(manners, **more)
        self.now = 1000.0
        self.decision = Decision()

    def after(self, seconds: int, reading: DeviceReading, minute: float = NOON) -> Decision:
        """What it does once it has had such readings for so long."""
        for _ in range(seconds + 1):
            self.decision = self.rules.decide(reading, self.now, minute)
            self.now += 1.0
        return self.decision


@pytest.mark.parametrize(
    ("manners", "reading", "work", "sentence"),
    [
        (Manners(), replace(CALM, on_battery=True), Work.FULL, ""),
        (
            Manners(on_battery="pause"),
            replace(CALM, on_battery=True),
            Work.PAUSED,
            "paused: on bat",
        ),
        (Manners(on_battery="slow"), replace(CALM, on_battery=True), Work.SLOW, "slow: on battery"),
        (Manners(when_idle=True), replace(CALM, idle_seconds=1.0), Work.PAUSED, "paused: its pers"),
        (Manners(when_idle=True), replace(CALM, idle_seconds=600.0), Work.FULL, ""),
        (Manners(when_idle=True), replace(CALM, others_cpu=0.6), Work.PAUSED, "paused: other prog"),
        (Manners(max_cpu=0.5), CALM, Work.SLOW, "slow: at most 50% of its processor"),
        (Manners(max_temperature=80), replace(CALM, temperature_c=82.0), Work.SLOW, "slow: hotter"),
        (
            Manners(max_temperature=80),
            replace(CALM, temperature_c=90.0),
            Work.PAUSED,
            "paused: hot",
        ),
        (Manners(max_temperature=80), replace(CALM, temperature_c=None), Work.FULL, ""),
    ],
)
def test_each_cause_has_its_work_and_its_sentence(
    manners: Manners, reading: DeviceReading, work: Work, sentence: str
) -> None:
    device = Device(manners)
    device.after(1, CALM)
    decision = device.after(6, reading)
    assert decision.work is work
    assert decision.sentence.startswith(sentence)
    assert bool(decision.sentence) is (work is not Work.FULL)
    assert (decision.share < 1) is (work is not Work.FULL)


def test_the_strictest_cause_decides_and_its_sentence_says_until_when() -> None:
    device = Device(Manners(max_cpu=0.1, on_battery="slow", quiet_hours="22-7"))
    assert device.after(3, replace(CALM, on_battery=True)).sentence == ("slow: on battery")
    assert device.decision.share == pytest.approx(0.1)
    night = device.after(0, CALM, minute=23 * 60)
    assert (night.work, night.sentence) == (Work.PAUSED, "left out until 7:00: quiet hours")
    assert device.after(0, CALM, minute=7 * 60.0).work is Work.SLOW


def test_a_device_with_fewer_threads_than_cores_rests_less() -> None:
    assert Device(Manners(max_cpu=0.5), busy_share=0.25).after(0, CALM) == Decision()
    assert Device(Manners(max_cpu=0.5), busy_share=0.8).after(0, CALM).share == 0.625


def test_slowing_down_that_does_not_cool_ends_in_a_pause_until_it_is_cool() -> None:
    device = Device(Manners(max_temperature=80))
    warm, between = replace(CALM, temperature_c=82.0), replace(CALM, temperature_c=78.0)
    assert device.after(30, warm).work is Work.SLOW
    assert device.after(60, warm).work is Work.PAUSED
    assert device.after(300, between).work is Work.PAUSED
    assert device.after(25, CALM).work is Work.PAUSED
    assert device.after(10, CALM).work is Work.FULL


def test_memory_that_others_take_is_left_to_them() -> None:
    device = Device(Manners())
    device.after(0, CALM)
    assert device.after(5, replace(CALM, available_bytes=300 << 20)).work is Work.FULL
    assert device.after(5, replace(CALM, available_bytes=100 << 20)).sentence == (
        "paused: its memory is nearly full"
    )
    assert device.after(100, replace(CALM, available_bytes=500 << 20)).work is Work.PAUSED
    assert device.after(61, CALM).work is Work.FULL


@given(seed=st.integers(0, 2**32), each_seconds=st.integers(1, 10))
def test_signs_that_flicker_change_its_mind_ever_less_often(seed: int, each_seconds: int) -> None:
    """In 20 minutes of a loose cable and swinging heat; without patience it is 50 times."""
    random = Random(seed)
    device, changes, before = Device(Manners(on_battery="pause", max_temperature=80)), 0, Work.FULL
    left = 1200
    while left > 0:
        seconds = random.randint(1, each_seconds)
        left -= seconds
        reading = replace(
            CALM,
            on_battery=random.random() < 0.5,
            temperature_c=random.choice((50.0, 77.0, 81.0, 90.0)),
        )
        work = device.after(seconds - 1, reading).work
        changes += work is not before
        before = work
    assert changes <= 12


@given(
    begin=st.integers(0, 1439),
    end=st.integers(0, 1439),
    minute=st.floats(0, 1440, exclude_max=True),
)
def test_quiet_hours_are_those_from_the_first_to_the_last_around_midnight(
    begin: int, end: int, minute: float
) -> None:
    if begin == end:
        return
    hours = QuietHours(begin, end)
    text = f"{begin // 60}:{begin % 60:02}-{end // 60}:{end % 60:02}"
    assert QuietHours.parse(text) == hours
    assert hours.contains(minute) is ((minute - begin) % 1440 < (end - begin) % 1440)
    work = Device(Manners(quiet_hours=hours)).after(0, CALM, minute).work
    assert (work is Work.PAUSED) is hours.contains(minute)


def test_a_cause_that_comes_back_soon_must_be_away_for_longer() -> None:
    limits = replace(USUAL_LIMITS, battery=LatchTimes(0.0, 4.0, 60.0, 2))
    device = Device(Manners(on_battery="pause"), limits=limits)  # type: ignore[arg-type]
    waited = []
    for _ in range(4):
        assert device.after(0, replace(CALM, on_battery=True)).work is Work.PAUSED
        began = device.now
        while device.after(0, CALM).work is Work.PAUSED:
            pass
        waited.append(device.now - began - 1)
    assert waited == [4.0, 8.0, 16.0, 16.0]
