from __future__ import annotations

from dataclasses import replace
from math import exp
from pathlib import Path

import pytest

from p2ptrain.coordinator.profile_pooling import (
    FAR_OFF,
    NOISE,
    DeviceProfile,
    mixed_kinds,
    pool_profiles,
)
from p2ptrain.plan.types.cluster import REFERENCE
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from p2ptrain.profiling.profile_cache import MAX_LETTERS, processor_kind


def measured(
    seconds: float, *, kind: str = "epyc", wall_by_cpu: float = 1.0, sizes: tuple[int, ...] = (4, 8)
) -> DeviceProfile:
    """Of two units, the second one twice as long; `seconds` on the wall for a sample."""
    times = tuple(
        UnitTimes((seconds * size, 2 * seconds * size), (seconds * size,) * 2, (0.0,) * 2)
        for size in sizes
    )
    return DeviceProfile(kind, wall_by_cpu, TimeTable(sizes, times), REFERENCE)


def forward(one: DeviceProfile, size: int) -> tuple[float, ...]:
    return one.times.at(size).forward


def test_devices_of_a_kind_have_the_mean_of_what_they_have_found() -> None:
    found = pool_profiles(
        {"a": measured(0.95), "b": measured(1.05), "c": measured(7.0, kind="atom")}
    )
    assert forward(found["a"], 4) == pytest.approx((4.0, 8.0))
    assert found["b"].times == found["a"].times
    assert forward(found["c"], 4) == (28.0, 56.0)


def test_what_they_have_in_common_is_processor_time_and_not_the_share_of_a_core() -> None:
    found = pool_profiles(
        {"a": measured(2.0, wall_by_cpu=2.0), "b": measured(12.0, wall_by_cpu=10.0)}
    )
    assert forward(found["a"], 4) == pytest.approx((2.2 * 4, 2.2 * 8))
    assert forward(found["b"], 4) == pytest.approx((11.0 * 4, 11.0 * 8))
    assert found["b"].wall_by_cpu == pytest.approx(10.0)
    overheads = found["a"].overheads
    assert overheads is not None
    of_both = (REFERENCE.byte_seconds / 2 + REFERENCE.byte_seconds / 10) / 2
    assert overheads.byte_seconds == pytest.approx(2 * of_both)


def test_who_is_far_off_is_another_kind_whatever_it_is_called() -> None:
    one = {"a": measured(1.0), "b": measured(1.0), "throttled": measured(FAR_OFF * 1.01)}
    found = pool_profiles(one)
    assert forward(found["a"], 4) == pytest.approx((4.0, 8.0))
    assert found["throttled"] == one["throttled"]


@pytest.mark.parametrize("times", [(1.0, 8.0), (1.0, 1.1, 8.0, 9.0)])
def test_two_halves_far_off_from_each_other_have_nothing_in_common(
    times: tuple[float, ...],
) -> None:
    """The middle of an even number lies between them, and nobody near it."""
    found = {str(number): measured(seconds) for number, seconds in enumerate(times)}
    assert pool_profiles(found) == found


def test_who_is_slower_than_noise_stays_so_with_the_units_of_its_kind() -> None:
    found = pool_profiles({"a": measured(1.0), "b": measured(1.0), "cold": measured(1.5)})
    fast, slow = forward(found["a"], 4)[0], forward(found["cold"], 4)[0]
    assert 1.5 * exp(-2 * NOISE) <= slow / fast < 1.5
    assert found["cold"].wall_by_cpu == 1.0, "its share of a core is what it was"


def test_nobody_is_alike_who_does_not_know_its_kind_or_has_other_units() -> None:
    other = TimeTable((4,), (UnitTimes((1.0,), (1.0,), (0.0,)),))
    one = {
        "a": measured(1.0, kind=""),
        "b": measured(1.1, kind=""),
        "c": measured(1.0),
        "d": replace(measured(1.0), times=other),
    }
    assert pool_profiles(one) == one


def test_who_measured_fewer_sizes_has_the_larger_ones_of_its_kind() -> None:
    found = pool_profiles(
        {"a": measured(1.0, sizes=(4, 8, 64)), "b": measured(1.2, sizes=(4, 8, 32))}
    )
    assert found["b"].times.sizes == (4, 8, 32, 64)
    assert forward(found["b"], 32) == pytest.approx((1.1 * 32, 1.1 * 64))
    assert forward(found["b"], 64) == pytest.approx((1.1 * 64, 2.2 * 64)), "at the level of both"


def test_sizes_that_devices_ran_once_are_taken_together() -> None:
    """Each came to others; by one alone, 8 samples would seem to take as long as 6."""
    slow, fast = (
        replace(measured(seconds, sizes=(1, size)), cold=frozenset({size}))
        for seconds, size in ((1.05, 6), (0.95, 8))
    )
    found = pool_profiles({"slow": slow, "fast": fast})["slow"]
    assert forward(found, 6) == pytest.approx((6.0, 12.0))
    assert forward(found, 8) == pytest.approx((8.0, 16.0))


def test_first_passes_count_only_where_nobody_has_warm_ones() -> None:
    """A slow device: its largest batch was run once, and took half as long again."""
    slow = measured(1.0, sizes=(4, 32))
    first = slow.times.times[1]
    longer = UnitTimes(*(tuple(1.5 * s for s in part) for part in (first.forward, first.backward)))
    cold = replace(
        slow,
        times=TimeTable((4, 32), (slow.times.times[0], replace(longer, weight=(0.0, 0.0)))),
        cold=frozenset({32}),
    )
    found = pool_profiles({"slow": cold, "fast": measured(1.0, sizes=(4, 64))})
    assert forward(found["slow"], 32) == pytest.approx((32.0, 64.0))
    assert found["slow"].times == found["fast"].times
    alone = pool_profiles({"slow": cold, "fast": measured(1.0, sizes=(4,))})
    assert forward(alone["fast"], 32) == pytest.approx((48.0, 96.0))


@pytest.mark.parametrize("took", [1.5, 0.9])
def test_a_first_pass_beyond_warm_ones_counts_where_it_is_below_what_follows_from_them(
    took: float,
) -> None:
    warm = measured(1.0, sizes=(4, 8, 16))
    longer = warm.times.at(16)
    first = UnitTimes(
        *(tuple(took * s for s in part) for part in (longer.forward, longer.backward)), (0.0, 0.0)
    )
    table = TimeTable((4, 8, 16), (*warm.times.times[:2], first))
    both = {name: replace(warm, times=table, cold=frozenset({16})) for name in ("a", "b")}
    for found in (pool_profiles(both)["a"], pool_profiles({"alone": both["a"]})["alone"]):
        assert forward(found, 16)[0] == pytest.approx(min(16.0, 16 * took))


def test_who_has_measured_half_of_a_size_has_a_say_in_what_it_takes() -> None:
    usual = measured(1.0, sizes=(4, 8))
    lucky = measured(1.0, sizes=(4, 16))
    quick = UnitTimes((8.0, 32.0), (16.0, 32.0), (0.0, 0.0))  # its first unit in half the time
    lucky = replace(lucky, times=TimeTable((4, 16), (lucky.times.times[0], quick)))
    names = ("a", "b", "c")
    found = pool_profiles({"lucky": lucky, **dict.fromkeys(names, usual)})
    assert forward(found["a"], 16) == pytest.approx((14.0, 32.0), rel=0.02)
    far = pool_profiles({"lucky": lucky, **dict.fromkeys(names, measured(1.0, sizes=(2, 4)))})
    assert forward(far["a"], 16) == pytest.approx((8.0, 32.0)), "half of it, not a quarter"


def test_overheads_are_those_of_whom_measured_them() -> None:
    found = pool_profiles({"a": measured(1.0), "b": replace(measured(1.0), overheads=None)})
    assert found["b"].overheads == REFERENCE


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("processor : 0\nmodel name : AMD EPYC\ncpu MHz : 2445.4\n", "model name AMD EPYC"),
        (
            "CPU implementer : 0x41\nCPU part : 0xd05\nCPU part : 0xd0a\nBogoMIPS : 38\n",
            "CPU implementer 0x41, CPU part 0xd05, CPU part 0xd0a",
        ),
    ],
)
def test_a_kind_is_read_without_what_changes_by_the_second(
    tmp_path: Path, lines: str, expected: str
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(lines)
    assert processor_kind(cpuinfo).endswith(expected)
    assert len(processor_kind(cpuinfo)) <= MAX_LETTERS


def test_a_kind_that_the_system_does_not_say_is_none(tmp_path: Path) -> None:
    assert processor_kind(tmp_path / "none") == ""
    (tmp_path / "empty").write_text("Hardware : unknown\n")
    assert processor_kind(tmp_path / "empty") == ""


def test_small_batches_say_nothing_of_those_in_which_samples_cost_less_at_once() -> None:
    once = measured(1.0, sizes=(4, 16)).times.times
    cheap = tuple(0.5 * seconds for seconds in once[1].forward)
    both = TimeTable((4, 16), (once[0], UnitTimes(cheap, cheap, (0.0,) * 2)))
    both = both.before_gain(16, {0, 1})
    small = TimeTable((4, 12), (both.at(4), both.at(12)))
    own = {"a": small, "b": both}
    found = pool_profiles(
        {n: replace(measured(1.0), times=times, cheaper_from=16) for n, times in own.items()}
    )
    assert forward(found["a"], 16) == pytest.approx(cheap)
    assert forward(found["b"], 16) == pytest.approx(cheap)


def test_devices_of_several_kinds_are_said_with_what_that_changes() -> None:
    assert mixed_kinds({"a": "x86", "b": "x86"}) == ()
    assert mixed_kinds({"a": "", "b": ""}) == ()
    (said,) = mixed_kinds({"pi": "torch 2.13, ARM", "b": "x86", "a": "x86"})
    assert "pi: torch 2.13, ARM" in said
    assert "a, b: x86" in said


def test_a_kind_names_the_instructions_that_kernels_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name : some\n")
    before = processor_kind(cpuinfo)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert processor_kind(cpuinfo) != before
