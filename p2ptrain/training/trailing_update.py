"""An update that is made while its sums still arrive, by the next round's first forward.

Before each unit the forward waits for the sums of that unit's gradients, and updates whatever has
all of its sums by then (P3, Jayarajan et al., MLSys 2019; ByteScheduler, Peng et al., SOSP 2019).
Here sum 0 comes long before 1 and 2, and 3 to 5 were there when the backward was over:

    compute   ... B B |copy| F: wait 0 | unit 0 | wait 1, 2 | units 1, 2 | unit 3 ...
    wire      ... sums 5 4 3 | sum 0 . . . . . . | sums 1, 2 |
"""

from __future__ import annotations

from p2ptrain.training.arrived import Arrived
from p2ptrain.training.live_stage import LiveStage
from p2ptrain.training.summed import Summed


class TrailingUpdate:
    """Of one stage and round, in the compute thread. Implements `stage.Passing`."""

    def __init__(
        self, live: LiveStage, summed: Summed, arrived: Arrived, micro_batches: int
    ) -> None:
        """Finish the update that `live` has begun.

        Args:
            summed: of the stage.
            arrived: sums of the update's round.
            micro_batches: of the round that begins.
        """
        self._live = live
        self._arrived = arrived
        self._micro_batches = micro_batches
        self._awaited: dict[int, set[str]] = {}  # unit -> names first used there, not updated yet
        for name, unit in summed.units.items():
            self._awaited.setdefault(unit, set()).add(name)
        self._buckets = summed.buckets_of_names()
        self._every = range(len(summed.buckets))

    def unit(self, number: int) -> None:
        """Wait for what that unit needs, and update all that can be.

        Raises:
            GivenUp: the round has been.
        """
        wanted = self._awaited.get(number)
        if not wanted:
            return
        there = self._arrived.wait(set[int]().union(*(self._buckets[name] for name in wanted)))
        self._live.update_some([n for n, buckets in self._buckets.items() if buckets <= there])
        for names in self._awaited.values():
            names.difference_update([n for n in names if self._buckets[n] <= there])

    def end(self) -> None:
        """Wait for all the others; the round of this forward begins then.

        Raises:
            GivenUp: the round has been.
        """
        self._arrived.wait(self._every)
        self._live.end_update()
        self._live.save(self._micro_batches)
