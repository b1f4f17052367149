r"""Which device of a stage takes which samples of a micro-batch, and so which device sends what.

Every device computes this itself from the plan, so no device forwards another's samples:

    stage p divides by samples 3:1        stage p+1 divides by samples 2:2

        a  [0 ........ 3)  -- [0, 2) -->  c  [0 ... 2)
                       \---- [2, 3) -->  d  [2 ... 4)
        b  [3 .. 4)  -------- [3, 4) -->

In a stage that deals whole micro-batches a device takes [0, size) of its own ones and nothing of
the others. In a tiled stage every device takes [0, size) of all of them, a part of each map
(`tile_layout`). Gradients take the same ways back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from p2ptrain.messages.assignment import Assignment, StageAssignment
from p2ptrain.messages.tensors import SampleRange
from p2ptrain.plan.types.allocation import Allocation, deal, sample_ranges


class SampleDivision:
    """How one stage divides any micro-batch among its devices."""

    def __init__(self, place: StageAssignment) -> None:
        self._place = place
        self.devices = place.devices
        is_dealt = place.shared and place.allocation is Allocation.MICRO_BATCHES
        self._turns: Sequence[int] = deal(place.shares) if is_dealt else (0,)
        self._known: dict[tuple[int, int], tuple[SampleRange, ...]] = {}  # by turn and size

    @staticmethod
    def of_holder(assignment: Assignment) -> SampleDivision:
        """The data holder, which has every sample, as if it were a stage of its own."""
        return SampleDivision(StageAssignment(0, 0, 1, (assignment.holder,), (1,)))

    def slices(self, micro_batch: int, size: int) -> tuple[SampleRange, ...]:
        """Who takes what of micro-batch number `micro_batch` of `size` samples, in their order.

        Only those that take something; of a tiled stage every device, all samples. An evaluation
        may have more micro-batches than a training round: dealing starts over then.
        """
        turn = micro_batch % len(self._turns)
        known = self._known.get((turn, size))
        if known is None:
            known = self._known[turn, size] = self._slices(turn, size)
        return known

    def _slices(self, turn: int, size: int) -> tuple[SampleRange, ...]:
        place = self._place
        if not place.shared:
            return (SampleRange(place.leader, 0, size),)
        if place.allocation is Allocation.TILES:
            return tuple(SampleRange(device, 0, size) for device in place.devices)
        if place.allocation is Allocation.MICRO_BATCHES:
            return (SampleRange(place.devices[self._turns[turn]], 0, size),)
        ranges = sample_ranges(place.shares, size)
        named = zip(place.devices, ranges, strict=True)
        return tuple(
            SampleRange(device, *limits) for device, limits in named if limits[0] < limits[1]
        )

    def part(self, device: str, micro_batch: int, size: int) -> SampleRange | None:
        """What `device` takes of it; None = nothing."""
        for part in self.slices(micro_batch, size):
            if part.device == device:
                return part
        return None

    def overlaps(self, micro_batch: int, size: int, own: SampleRange) -> tuple[SampleRange, ...]:
        """Who of this stage has which of the samples of `own`, a part of a neighbouring stage."""
        others = self.slices(micro_batch, size)
        if len(others) == 1 and others[0].first <= own.first and own.end <= others[0].end:
            return (
                others if others[0].size == own.size else (replace(own, device=others[0].device),)
            )
        return tuple(
            SampleRange(other.device, max(other.first, own.first), min(other.end, own.end))
            for other in others
            if max(other.first, own.first) < min(other.end, own.end)
        )


def divisions(assignment: Assignment) -> Sequence[SampleDivision]:
    """One a stage, and behind the last one the holder, which gets the model's outputs."""
    return [
        *(SampleDivision(place) for place in assignment.stages),
        SampleDivision.of_holder(assignment),
    ]
