"""Sums that a thread waits for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from p2ptrain.runtime.allreduce_buckets import ArrivedSums, SumsAbandoned


def test_who_waits_goes_on_when_all_of_it_is_there() -> None:
    arrived = ArrivedSums()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(arrived.wait, {0, 2})
        for bucket in (0, 1, 2):
            assert not waiting.done()
            arrived.add(bucket)
        assert waiting.result(5) == {0, 1, 2}
    assert arrived.waited_seconds > 0


def test_what_is_there_is_not_waited_for() -> None:
    arrived = ArrivedSums()
    assert arrived.wait(()) == frozenset()
    arrived.add(3)
    assert arrived.wait({3}) == {3}


def test_given_up_nobody_waits_for_what_is_missing() -> None:
    arrived = ArrivedSums()
    arrived.add(0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(arrived.wait, {0, 1})
        arrived.give_up()
        with pytest.raises(SumsAbandoned):
            waiting.result(5)
    assert arrived.wait({0}) == {0}, "what is there may be used up"
    with pytest.raises(SumsAbandoned):
        arrived.wait({1})
