"""When nothing moves any more, and who has not sent what it must have made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.recovery.recovery_settings import HOME
from p2ptrain.recovery.standstill import (
    QUESTION_BYTES,
    QUIET_BYTES,
    MissingPiece,
    ProgressCounters,
    StallDetector,
    Standing,
    Unsent,
    has_moved,
    unsent,
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


WARMUPS = (3, 2, 1)


def waits(stage: int, what: str, round_index: int, micro_batch: int, sender: str) -> Standing:
    backward = what == "gradient"
    wait = MissingPiece(stage, backward, round_index, micro_batch, frozenset({sender}), 5.0)
    return Standing((wait,), ((stage, round_index),), False, frozenset())


def named(a: Standing, b: Standing, c: Standing) -> tuple[str, str] | None:
    found = unsent({"a": a, "b": b, "c": c}, WARMUPS, 4.0)
    return None if found is None else (found.sender, found.receiver)


def test_an_activation_that_was_kept_back() -> None:
    """b waits for a gradient, so it has been through that micro-batch's forward."""
    a = waits(0, "gradient", 4, 0, "b")
    b, c = waits(1, "gradient", 4, 0, "c"), waits(2, "activation", 4, 0, "b")
    assert named(a, b, c) == ("b", "c")


def test_a_gradient_that_was_kept_back() -> None:
    """b waits for activation 3, which in its order comes after the backward of 1."""
    a = waits(0, "gradient", 4, 1, "b")
    b, c = waits(1, "activation", 4, 3, "a"), waits(2, "activation", 4, 2, "b")
    assert named(a, b, c) == ("b", "a")


def test_a_stage_between_two_rounds_has_passed_all_of_the_last_one() -> None:
    idle = Standing((), ((1, 4),), False, frozenset())
    a, c = waits(0, "gradient", 4, 3, "b"), waits(2, "activation", 5, 0, "b")
    assert named(a, idle, c) == ("b", "a")
    assert named(idle, replace(idle, rounds=((1, 4),)), c) is None, "round 5 was not begun"


@pytest.mark.parametrize(
    "change",
    [{"is_busy": True}, {"suspects": frozenset({"c"})}],
)
def test_who_computes_or_has_lost_touch_is_not_blamed(change: dict[str, object]) -> None:
    a, b = waits(0, "gradient", 4, 0, "b"), waits(1, "gradient", 4, 0, "c")
    c = waits(2, "activation", 4, 0, "b")
    b = replace(b, **change)  # type: ignore[arg-type]
    assert named(a, b, c) is None


def test_nor_is_one_that_the_receiver_has_lost_touch_with() -> None:
    a, b = waits(0, "gradient", 4, 0, "b"), waits(1, "gradient", 4, 0, "c")
    c = replace(waits(2, "activation", 4, 0, "b"), suspects=frozenset({"b"}))
    assert named(a, b, c) is None


def test_a_wait_that_has_just_begun_says_nothing() -> None:
    a, b = waits(0, "gradient", 4, 0, "b"), waits(1, "gradient", 4, 0, "c")
    c = waits(2, "activation", 4, 0, "b")
    assert unsent({"a": a, "b": b, "c": c}, WARMUPS, 6.0) is None
    found = unsent({"a": a, "b": b, "c": c}, WARMUPS, 4.0)
    assert found == Unsent("b", "c", c.waits[0])


def test_it_travels() -> None:
    standing = waits(2, "activation", 4, 0, "b")
    assert Standing.from_bytes(standing.to_bytes()) == standing
