"""Of stages that wait for each other the one is named that has passed what it has not sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.recovery.standstill import MissingPiece, Standing, Unsent, unsent

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
