"""A straight pipeline being considered: one device a stage, devices as indexes, nothing predicted.

Planners compare thousands of drafts and turn the best one into a `Plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.schedule import usual_warmup
from p2ptrain.plan.split import BatchSplit


@dataclass(frozen=True, slots=True)
class Draft:
    """Stage p is units [borders[p], borders[p+1]) on devices[p] with depth warmup[p].

    The first and the last device may be the same one (`--private`), no others.
    """

    split: BatchSplit
    borders: tuple[int, ...]
    devices: tuple[int, ...]
    warmup: tuple[int, ...]

    @property
    def units(self) -> tuple[tuple[int, int], ...]:
        """[first, end) of every stage."""
        return tuple(pairwise(self.borders))

    @property
    def shared_ends(self) -> bool:
        """Whether one device has the first and the last of several stages."""
        return len(self.devices) > 1 and self.devices[0] == self.devices[-1]


def draft_pipeline(
    cost: CostModel,
    split: BatchSplit,
    borders: Sequence[int],
    devices: Sequence[int],
    wanted: Sequence[int] | None = None,
) -> Draft | None:
    """The draft with the depths wanted (usual: 2(P-p)-1), lowered where memory is short.

    Depths never grow from one stage to the next. None where a device cannot hold its units with
    even one micro-batch in flight.
    """
    depths = list(wanted or usual_warmup(len(devices), split.micro_batches))
    draft = Draft(split, tuple(borders), tuple(devices), tuple(depths))
    # The last stage of a private plan needs no depth, and shares its memory with the first.
    taken_bytes = 0
    if draft.shared_ends:
        depths[-1] = 1
        taken_bytes = cost.peak_bytes(*draft.units[-1], split.in_flight_samples(1))
    limit = split.micro_batches
    for p, (device, (first, end)) in enumerate(zip(devices, draft.units, strict=True)):
        memory_bytes = cost.devices[device].memory_bytes
        if draft.shared_ends and p == 0:
            memory_bytes -= taken_bytes
        limit = min(limit, split.deepest(cost.samples_that_fit(first, end, memory_bytes)))
        if limit < 1:
            return None
        limit = depths[p] = min(depths[p], limit)
    return replace(draft, warmup=tuple(depths))


def peak_bytes(cost: CostModel, draft: Draft) -> dict[int, int]:
    """Peak memory by device."""
    peaks: dict[int, int] = {}
    for device, (first, end), warmup in zip(draft.devices, draft.units, draft.warmup, strict=True):
        samples = draft.split.in_flight_samples(warmup)
        peaks[device] = peaks.get(device, 0) + cost.peak_bytes(first, end, samples)
    return peaks
