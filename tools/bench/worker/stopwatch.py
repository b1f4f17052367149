"""Seconds of rounds: some to warm up, then those that count."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from tools.bench.worker.channel import Channel

Round = Callable[[int], None]


def timed(action: Callable[[], object]) -> float:
    """Seconds that it takes."""
    begin = perf_counter()
    action()
    return perf_counter() - begin


def run_rounds(channel: Channel, run: Round, warm: int, steady: int) -> list[float]:
    """Run `warm` rounds, say `steady`, then run those that count; seconds of these."""
    for number in range(warm):
        run(number)
    channel.say("steady")
    return [timed(lambda n=number: run(n)) for number in range(warm, warm + steady)]  # type: ignore[misc]
