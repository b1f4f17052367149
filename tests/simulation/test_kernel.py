"""The kernel executes in order of time, then of scheduling, and hashes what it did."""

from __future__ import annotations

import pytest

from tests.simulation.kernel import EventStorm, Kernel


def _run(label: bytes) -> tuple[list[str], str]:
    kernel, seen = Kernel(), []
    kernel.at(2.0, b"late", lambda: seen.append("late"))
    kernel.at(1.0, label, lambda: seen.append("first"))
    kernel.at(1.0, b"second", lambda: kernel.after(0.5, b"third", lambda: seen.append("third")))
    kernel.run_until(1.9)
    return seen, kernel.event_hash


def test_events_run_in_order_and_only_when_due() -> None:
    seen, _ = _run(b"first")
    assert seen == ["first", "third"]


def test_the_hash_tells_runs_apart() -> None:
    assert _run(b"first")[1] == _run(b"first")[1]
    assert _run(b"first")[1] != _run(b"other")[1]


def test_the_past_cannot_be_scheduled() -> None:
    kernel, seen = Kernel(), []
    kernel.run_until(5.0)
    kernel.at(1.0, b"past", lambda: seen.append(kernel.now))
    kernel.run_until(5.0)
    assert seen == [5.0]


def test_events_that_beget_events_are_noticed() -> None:
    kernel = Kernel()

    def answer() -> None:
        kernel.after(0.00001, b"answer", answer)

    answer()
    with pytest.raises(EventStorm):
        kernel.run_until(1.0)
