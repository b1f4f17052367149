"""Equal devices compute nearly all the time where nobody waits for a round to end."""

from __future__ import annotations

from tools.async_busy import Result, Setting, measure

TRIES = 3
"""Tasks are real time here: where the machine does other things meanwhile, they take longer."""


async def test_without_a_barrier_devices_wait_less_than_with_one() -> None:
    """Three stages and two micro-batches: half of a round is waiting, and none of it without.

    What messages cost here, beside other work on the same machine, counts as waiting: tasks are
    long beside that.
    """
    seen = []
    while not any(_shows_it(*one) for one in seen):
        assert len(seen) < TRIES, seen
        free = await measure(Setting(3, 0.08, 0.16, steps=10))
        seen.append((free, await measure(Setting(3, 0.08, 0.16, steps=10, micro_batches=2))))


def _shows_it(free: Result, rounds: Result) -> bool:
    waits_less = min(free.busy) > max(rounds.busy) + 0.1
    return waits_less and max(rounds.busy) < 0.55 and free.seconds < 0.8 * rounds.seconds
