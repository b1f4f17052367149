"""Equal devices compute nearly all the time where nobody waits for a round to end."""

from __future__ import annotations

from tools.async_busy import Setting, measure


async def test_without_a_barrier_devices_wait_less_than_with_one() -> None:
    """Three stages and two micro-batches: half of a round is waiting, and none of it without.

    What messages cost here, beside other work on the same machine, counts as waiting: tasks are
    long beside that.
    """
    free = await measure(Setting(3, 0.08, 0.16, steps=10))
    rounds = await measure(Setting(3, 0.08, 0.16, steps=10, micro_batches=2))
    assert min(free.busy) > max(rounds.busy) + 0.1
    assert max(rounds.busy) < 0.55
    assert free.seconds < 0.8 * rounds.seconds
