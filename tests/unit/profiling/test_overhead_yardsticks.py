from __future__ import annotations

from dataclasses import asdict
from itertools import count
from pathlib import Path

from p2ptrain.coordinator.measured_cluster import MeasuredDevice, overheads_of
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.profiling.overhead_yardsticks import YARDSTICK_SECONDS, measure_overheads
from p2ptrain.profiling.profile_cache import ProfileCache
from p2ptrain.profiling.unit_passes import CpuClock


def ticking(cpu_step: float, wall_step: float) -> CpuClock:
    """Each look at a clock finds it one step further."""
    cpu, wall = count(), count()
    return CpuClock(wall=lambda: next(wall) * wall_step, cpu=lambda: next(cpu) * cpu_step)


def test_every_yardstick_takes_time() -> None:
    measured = measure_overheads()
    assert all(value > 0 for value in asdict(measured).values())
    assert measured.byte_seconds * 1000 < measured.message_seconds


def test_the_coordinator_takes_what_a_device_measured() -> None:
    measured = measure_overheads(clock=ticking(YARDSTICK_SECONDS, YARDSTICK_SECONDS))
    new = MeasuredDevice("1", "new", {"overheads": asdict(measured)}, MemoryBudgets(1))
    assert overheads_of(new) == measured
    assert overheads_of(MeasuredDevice("2", "old", {}, MemoryBudgets(1))) is None


def test_a_profile_with_overheads_survives_in_the_cache(tmp_path: Path) -> None:
    measured = {"units": [], "overheads": asdict(measure_overheads())}
    ProfileCache(tmp_path).put("key", measured)
    assert ProfileCache(tmp_path).get("key") == measured
