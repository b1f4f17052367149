"""What a look says of units and of devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import ProtocolError
from p2ptrain.net import cbor
from p2ptrain.net.forms import write_form
from p2ptrain.net.read_form import read_form
from p2ptrain.recovery.commit import Seat
from p2ptrain.recovery.profile_corrections import (
    ExpectedSeconds,
    ProfileCorrections,
    StageSeconds,
    as_they_are,
    work_ratio,
)

RANGES = {0: (0, 2), 1: (2, 5)}
A, B = (0, "a"), (1, "b")
EXPECTED = {A: ExpectedSeconds(wall=2.0, cpu=1.0), B: ExpectedSeconds(wall=6.0, cpu=3.0)}


def test_processor_time_seen_first_is_the_units_and_counts_for_every_device() -> None:
    busy = {A: StageSeconds(wall=2.0, cpu=1.0), B: StageSeconds(wall=12.0, cpu=6.0)}
    found = ProfileCorrections().learned(RANGES, EXPECTED, busy)
    assert found.units == (1.0, 1.0, 2.0, 2.0, 2.0)
    assert found.devices == {"a": 1.0, "b": 1.0}


def test_work_counts_by_the_time_that_was_expected_of_it() -> None:
    busy = {A: StageSeconds(wall=9.0, cpu=1.0), B: StageSeconds(wall=9.0, cpu=6.0)}
    assert work_ratio(EXPECTED, busy) == (2.0 * 1 + 6.0 * 2) / 8.0
    assert work_ratio(EXPECTED, _as_expected()) == 1.0


def test_processor_time_that_changes_later_is_the_devices() -> None:
    first = ProfileCorrections().learned(RANGES, EXPECTED, _as_expected())
    busy = {A: StageSeconds(wall=2.0, cpu=1.0), B: StageSeconds(wall=12.0, cpu=6.0)}
    found = first.learned(RANGES, EXPECTED, busy)
    assert found.units == (1.0,) * 5
    assert found.devices == {"a": 1.0, "b": 2.0}


def test_a_smaller_share_of_a_core_is_the_devices_even_at_first() -> None:
    busy = {A: StageSeconds(wall=2.0, cpu=1.0), B: StageSeconds(wall=24.0, cpu=3.0)}
    found = ProfileCorrections().learned(RANGES, EXPECTED, busy)
    assert found.units == (1.0,) * 5
    assert found.devices == {"a": 1.0, "b": 4.0}


def test_devices_of_one_stage_are_distinguished_by_processor_time() -> None:
    one, other = (0, "a"), (0, "b")
    expected = {one: ExpectedSeconds(2.0, 2.0), other: ExpectedSeconds(2.0, 2.0)}
    busy = {one: StageSeconds(2.0, 2.0), other: StageSeconds(6.0, 6.0)}
    found = ProfileCorrections().learned({0: (0, 3)}, expected, busy)
    assert found.units == (2.0,) * 3
    assert found.devices == pytest.approx({"a": 0.5, "b": 1.5})


def test_a_device_with_both_ends_has_the_mean_of_its_stages() -> None:
    first, last = (0, "a"), (1, "a")
    expected = {first: ExpectedSeconds(1.0, 1.0), last: ExpectedSeconds(3.0, 3.0)}
    known = ProfileCorrections((1.0,) * 5)
    found = known.learned(
        RANGES, expected, {first: StageSeconds(4.0, 1.0), last: StageSeconds(12.0, 3.0)}
    )
    assert found.devices == {"a": 4.0}


def test_messages_beside_the_tasks_explain_a_part() -> None:
    expected = ExpectedSeconds(wall=2.0, cpu=1.0, beside=0.5)
    assert expected.share_factor(StageSeconds(2.4, 1.0)) == 1.0
    assert expected.share_factor(StageSeconds(5.0, 1.0)) == 2.0
    assert expected.share_factor(StageSeconds(1.0, 1.0)) == 0.5


def test_a_device_that_waits_part_of_the_round_is_not_believed_to_be_as_fast_as_it_looks() -> None:
    expected = ExpectedSeconds(wall=4.0, cpu=2.0)
    assert expected.factor(StageSeconds(2.0, 2.0)) == 0.5
    assert expected.factor(StageSeconds(2.0, 2.0, round_seconds=3.0)) == 0.75
    assert expected.factor(StageSeconds(2.0, 2.0, round_seconds=9.0)) == 1.0
    assert expected.factor(StageSeconds(6.0, 2.0, round_seconds=9.0)) == 1.5  # too slow is too slow


def test_a_device_that_has_little_to_do_is_not_judged_to_be_slow() -> None:
    """One of the others' rounds: its tasks took long, and nobody waited for them."""
    expected = ExpectedSeconds(wall=1.0, cpu=0.2)
    assert expected.factor(StageSeconds(5.0, 1.0, round_seconds=20.0)) == 1.0
    assert expected.factor(StageSeconds(5.0, 1.0, round_seconds=10.0)) == 5.0


@given(st.floats(0.1, 10.0), st.booleans())
def test_processor_time_of_a_device_with_little_to_do_is_the_units_or_nobodys(
    times: float, is_first: bool
) -> None:
    known = ProfileCorrections() if is_first else ProfileCorrections((1.0,) * 5)
    busy = {seat: StageSeconds(due.wall, due.cpu * times, 60.0) for seat, due in EXPECTED.items()}
    found = known.learned(RANGES, EXPECTED, busy)
    assert found.devices == pytest.approx({"a": 1.0, "b": 1.0})
    assert found.units == pytest.approx((times if is_first else 1.0,) * 5)


@given(st.floats(1.1, 4.0), st.floats(0.3, 1.0))
def test_what_was_too_fast_is_no_surprise_when_it_is_as_it_was(rest: float, seen: float) -> None:
    """Looked at while it rests, and again with work for all of the round."""
    due = ExpectedSeconds(wall=2.0, cpu=1.0)
    resting = StageSeconds(2.0 * seen, 1.0, round_seconds=2.0 * rest)
    believed = as_they_are({A: due}, {A: resting})[A]
    assert believed.factor(StageSeconds(2.0, 1.0)) == pytest.approx(1.0)


def _as_expected() -> dict[Seat, StageSeconds]:
    return {seat: StageSeconds(due.wall, due.cpu) for seat, due in EXPECTED.items()}


_seconds = st.floats(0.01, 100.0)


@given(_seconds, _seconds, _seconds, _seconds)
def test_a_plan_made_with_what_was_learned_expects_what_was_seen(
    wall_a: float, cpu_a: float, wall_b: float, cpu_b: float
) -> None:
    """Of a pipeline of single devices: units times devices is what each stage took."""
    busy = {A: StageSeconds(wall_a, cpu_a), B: StageSeconds(wall_b, cpu_b)}
    found = ProfileCorrections().learned(RANGES, EXPECTED, busy)
    for seat, first in ((A, 0), (B, 2)):
        factor = found.units[first] * found.devices[seat[1]]
        wanted = busy[seat].wall / EXPECTED[seat].wall
        seen = (wanted, busy[seat].cpu / EXPECTED[seat].cpu, found.devices[seat[1]])
        if all(0.03 < one < 30 for one in seen):  # else it is bounded
            assert factor == pytest.approx(wanted)


@given(_seconds, _seconds, _seconds)
def test_once_settled_the_same_again_teaches_nothing(
    wall: float, cpu: float, round_seconds: float
) -> None:
    busy = {A: StageSeconds(wall, cpu, round_seconds), B: StageSeconds(6.0, 3.0)}
    first = ProfileCorrections().learned(RANGES, EXPECTED, busy)
    again = first.learned(RANGES, as_they_are(EXPECTED, busy), busy)
    assert again.units == first.units
    assert again.devices == pytest.approx(first.devices)


@given(_seconds, _seconds, _seconds)
def test_the_same_again_after_a_change_of_plan_teaches_nothing_more(
    wall: float, cpu: float, round_seconds: float
) -> None:
    """What the next plan expects is made of what was learned; it must not be learned twice."""
    busy = {A: StageSeconds(wall, cpu, max(wall, round_seconds)), B: StageSeconds(6.0, 3.0)}
    found = ProfileCorrections((1.0,) * 5)
    for _ in range(2):
        before, found = found, found.learned(RANGES, _expected_by(found), busy)
    seen = (*found.devices.values(), *found.work.values(), *before.devices.values())
    if all(0.03 < one < 30 for one in seen):  # else it is bounded
        assert found.work == pytest.approx(before.work)
        again = found.learned(RANGES, _expected_by(found), busy)
        assert again.devices == pytest.approx(found.devices)


def _expected_by(known: ProfileCorrections) -> dict[Seat, ExpectedSeconds]:
    """What a plan of the same stages expects; see `expectations.correct_profiles`."""
    expected = {}
    for seat, due in EXPECTED.items():
        slower = known.of_device(seat[1])
        expected[seat] = ExpectedSeconds(
            due.wall * slower, due.cpu * slower / known.of_share(seat[1])
        )
    return expected


def test_they_travel() -> None:
    sent = ProfileCorrections((1.0, 2.5), {"a": 0.5}, {"a": 0.25})
    fields = cbor.loads(cbor.dumps(write_form(sent)), 1 << 16)
    assert read_form(ProfileCorrections, fields, "corrections") == sent


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {"units": [0.0], "devices": {}, "work": {}},
        {"units": [], "devices": {"a": float("nan")}, "work": {}},
        {"units": [], "devices": {}, "work": {"a": 0.0}},
        {"units": ["1"], "devices": {}, "work": {}},
        {"units": [], "devices": {1: 1.0}, "work": {}},
    ],
)
def test_nonsense_is_refused(fields: object) -> None:
    with pytest.raises(ProtocolError):
        read_form(ProfileCorrections, fields, "corrections")
