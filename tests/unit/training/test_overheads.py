from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from p2ptrain.model.timing import Clock
from p2ptrain.training.household_plan import Candidate, overheads_of
from p2ptrain.training.overheads import YARDSTICK_SECONDS, Look, measure_overheads
from p2ptrain.training.profiling import ProfileCache


def ticking(cpu_step: float, wall_step: float) -> Clock:
    """Each look at a clock finds it one step further."""
    cpu, wall = count(), count()
    return Clock(wall=lambda: next(wall) * wall_step, cpu=lambda: next(cpu) * cpu_step)


def following(cpu_step: float, wall_by_cpu: float) -> Clock:
    """Each look at the processor's time finds it one step further; the wall's follows it."""
    cpu = 0.0

    def look_at_cpu() -> float:
        nonlocal cpu
        cpu += cpu_step
        return cpu

    return Clock(wall=lambda: cpu * wall_by_cpu, cpu=look_at_cpu)


def test_every_yardstick_takes_time() -> None:
    measured = measure_overheads()
    assert all(value > 0 for value in measured.to_json().values())
    assert measured.byte_seconds * 1000 < measured.message_seconds
    assert measured.unpack_byte_seconds < measured.pack_byte_seconds


def test_a_share_of_a_core_makes_everything_take_so_much_longer() -> None:
    def measured(wall_by_cpu: float) -> dict[str, float]:
        clock = following(YARDSTICK_SECONDS, wall_by_cpu)
        return measure_overheads(clock).to_json()

    whole, fifth = measured(1.0), measured(5.0)
    for name, seconds in whole.items():
        assert fifth[name] == pytest.approx(5 * seconds)


def test_the_share_is_taken_from_all_that_the_thread_has_computed() -> None:
    """It had a quarter of its core for 10 s; the yardsticks alone happened to have all of it."""
    begin = Look(wall=-40.0, cpu=-10.0)
    alone = measure_overheads(following(YARDSTICK_SECONDS, 1.0))
    longer = measure_overheads(following(YARDSTICK_SECONDS, 1.0), begin)
    assert longer.message_seconds == pytest.approx(4 * alone.message_seconds, rel=0.02)


def test_the_coordinator_takes_what_a_device_measured() -> None:
    measured = measure_overheads(ticking(YARDSTICK_SECONDS, YARDSTICK_SECONDS))
    new = Candidate("1", "new", {"overheads": measured.to_json()}, 1)
    assert overheads_of(new) == measured
    assert overheads_of(Candidate("2", "old", {}, 1)) is None


def test_a_profile_with_overheads_survives_in_the_cache(tmp_path: Path) -> None:
    measured = {"units": [], "overheads": measure_overheads().to_json()}
    ProfileCache(tmp_path).put("key", measured)
    assert ProfileCache(tmp_path).get("key") == measured
