"""When a generation stands still."""

from __future__ import annotations

import pytest

from p2ptrain.recovery.recovery_settings import HOME
from p2ptrain.recovery.standstill import (
    QUESTION_BYTES,
    QUIET_BYTES,
    ProgressCounters,
    StallDetector,
    has_moved,
)

HERE = {"a": ProgressCounters(5, 10_000, 7.0), "b": ProgressCounters(9, 500, 3.0)}


def test_two_looks_that_show_the_same_are_a_standstill() -> None:
    watch = StallDetector(0.0)
    assert watch.due == HOME.quiet_seconds
    assert not watch.look(HERE, 30.0)
    assert watch.due == 30.0 + HOME.quiet_seconds
    assert watch.look(HERE, 60.0)


@pytest.mark.parametrize(
    "moved",
    [
        ProgressCounters(10, 500, 3.0),
        ProgressCounters(9, 501 + QUIET_BYTES + 2 * QUESTION_BYTES, 3.0),
        ProgressCounters(9, 500, 3.1 + HOME.quiet_cpu_seconds),
    ],
)
def test_a_task_a_tensor_on_its_way_or_work_is_progress(moved: ProgressCounters) -> None:
    watch = StallDetector(0.0)
    watch.look(HERE, 30.0)
    assert not watch.look({**HERE, "b": moved}, 60.0)
    assert watch.look({**HERE, "b": moved}, 90.0)


def test_what_membership_moves_is_none() -> None:
    watch = StallDetector(0.0)
    watch.look(HERE, 30.0)
    assert watch.look({**HERE, "b": ProgressCounters(9, 500 + QUIET_BYTES, 3.5)}, 60.0)


def test_a_word_of_a_stage_begins_the_count_again() -> None:
    watch = StallDetector(0.0)
    watch.look(HERE, 30.0)
    watch.moved(31.0)
    assert watch.due == 31.0 + HOME.quiet_seconds
    assert not watch.look(HERE, 61.0)


def test_the_questions_themselves_are_no_progress() -> None:
    """The holder asks forty devices every 1.5 s, 340 bytes each time both ways."""
    before = {f"{number:02}": ProgressCounters(9, 500, 3.0) for number in range(40)}
    now = {**before, "00": ProgressCounters(9, 500 + 40 * 680, 3.0)}
    assert not has_moved(before, now, seconds=1.5)
    assert has_moved(before, {**before, "00": ProgressCounters(9, 100_000, 3.0)}, seconds=1.5)
