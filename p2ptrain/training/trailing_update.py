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
        self._summed = summed
        self._arrived = arrived
        self._micro_batches = micro_batches
        self._there = frozenset[int]()  # sums of which the update is made

    def unit(self, number: int) -> None:
        """Wait for what that unit needs, and update all that can be.

        Raises:
            GivenUp: the round has been.
        """
        wanted = self._summed.buckets_of_units.get(number, frozenset())
        if wanted <= self._there:
            return
        self._there = self._arrived.wait(wanted)
        buckets = self._summed.buckets_of_names.items()
        self._live.update_some([name for name, numbers in buckets if numbers <= self._there])

    def end(self) -> None:
        """Wait for all the others; the round of this forward begins then.

        Raises:
            GivenUp: the round has been.
        """
        self._arrived.wait(range(len(self._summed.buckets)))
        self._live.end_update()
        self._live.save(self._micro_batches)
