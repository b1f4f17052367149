from __future__ import annotations

from collections.abc import Callable

from p2ptrain.net.link.flow_control import StallWatch


def first_stall(
    received: Callable[[int], int], partial: bool = True, until: int = 100
) -> int | None:
    """At which second a watch of 10 s and 4096 bytes gives up, asked once a second."""
    watch = StallWatch(10.0, 4096)
    for second in range(until):
        if watch.stalled(partial, received(second), float(second)):
            return second
    return None


def test_silence_inside_a_message_is_a_stall() -> None:
    """S15: a header, then silence."""
    assert first_stall(lambda second: 500) == 10


def test_a_byte_a_second_is_a_stall() -> None:
    """S15: a byte a second is a stall."""
    assert first_stall(lambda second: second) == 10


def test_a_slow_link_is_not() -> None:
    assert first_stall(lambda second: second * 1000) is None


def test_silence_between_messages_is_not() -> None:
    assert first_stall(lambda second: 500, partial=False) is None


def test_progress_restarts_the_time() -> None:
    assert first_stall(lambda second: 0 if second < 8 else 5000) == 18


def test_the_end_of_a_message_restarts_the_time() -> None:
    watch = StallWatch(10.0, 4096)
    assert not watch.stalled(True, 0, 0.0)
    assert not watch.stalled(False, 0, 9.0)
    assert not watch.stalled(True, 0, 11.0)
    assert not watch.stalled(True, 0, 20.0)
    assert watch.stalled(True, 0, 21.0)
