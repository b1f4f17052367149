"""Groups whose shares make the slowest device as fast as possible.

Asteroid's algorithm 1 (section 3.4) starts from capacities at one size and then moves blocks;
times are not proportional to samples here, so shares are dealt out one step at a time to the device
that would finish it first, which is the optimum for times that grow with the share.

Shares by computing time alone would give a fast device behind a slow link more than that link can
carry. Devices compute and communicate at once, so a device's round takes the longer of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import StageGroup, alone
from p2ptrain.plan.problem.question import Constraints
from p2ptrain.plan.types.allocation import Allocation, BatchSplit, hand_out

Floats: TypeAlias = NDArray[np.float64]

FINE = 64
"""Up to so many samples or micro-batches are dealt out one by one."""


class ShareDivider:
    """Groups for the stages of one cost model that obey the caps; keeps what it has computed."""

    def __init__(self, cost: CostModel, rules: Constraints) -> None:
        self.cost, self.rules = cost, rules
        self._groups: dict[tuple[object, ...], StageGroup | None] = {}
        self._exchanges: dict[tuple[tuple[int, ...], int], SampleExchange] = {}

    def samples(
        self,
        split: BatchSplit,
        devices: tuple[int, ...],
        units: tuple[int, int],
        depth: int = 1,
    ) -> StageGroup | None:
        """Samples of each micro-batch by speed, as far as memory holds `depth` micro-batches.

        None where it does not, or where there are fewer samples than devices.
        """
        key = "samples", split, devices, units, depth
        if key not in self._groups:
            self._groups[key] = self._by_samples(split, devices, units, depth)
        return self._groups[key]

    def micro_batches(
        self, split: BatchSplit, devices: tuple[int, ...], units: tuple[int, int]
    ) -> StageGroup | None:
        """Whole micro-batches by speed; None where there are fewer than devices."""
        key = "micro_batches", split, devices, units
        if key not in self._groups:
            self._groups[key] = self._by_micro_batches(split, devices, units)
        return self._groups[key]

    def _by_samples(
        self, split: BatchSplit, devices: tuple[int, ...], units: tuple[int, int], depth: int
    ) -> StageGroup | None:
        if len(devices) == 1:
            return alone(split, devices[0])
        cost, in_flight = self.cost, split.in_flight_samples(depth)
        per_sample = in_flight / split.first_samples  # micro-batches really in flight
        allowed = self._allowed(split, devices, units, split.micro_batch)
        most = [
            min(
                int(cost.samples_that_fit(*units, cost.devices[device].memory_bytes) / per_sample),
                allowed[place],
            )
            for place, device in enumerate(devices)
        ]

        links = [self._link_seconds(devices, device, units) for device in devices]

        def seconds(place: int, samples: int) -> float:
            computing = sum(cost.stage_seconds(devices[place], *units, samples))
            return max(computing, samples * links[place])

        shares = even_out(split.micro_batch, most, seconds)
        return None if shares is None else StageGroup(devices, shares)

    def _by_micro_batches(
        self, split: BatchSplit, devices: tuple[int, ...], units: tuple[int, int]
    ) -> StageGroup | None:
        if len(devices) == 1:
            return alone(split, devices[0])
        cost, size = self.cost, split.first_samples
        each = [
            max(
                sum(cost.stage_seconds(device, *units, size)),
                size * self._link_seconds(devices, device, units),
            )
            for device in devices
        ]
        count = split.micro_batches
        most = self._allowed(split, devices, units, count)
        shares = even_out(count, most, lambda place, n: n * each[place])
        return None if shares is None else StageGroup(devices, shares, Allocation.MICRO_BATCHES)

    def _link_seconds(self, devices: tuple[int, ...], device: int, units: tuple[int, int]) -> float:
        """Seconds a sample that the device's links are busy at least."""
        key = tuple(sorted(devices)), device
        if key not in self._exchanges:
            self._exchanges[key] = exchange(self.cost, devices, device)
        return self._exchanges[key].seconds(*units)

    def _allowed(
        self, split: BatchSplit, devices: tuple[int, ...], units: tuple[int, int], total: int
    ) -> list[int]:
        """The largest share of `total` that each device's cap allows."""
        if not self.rules.caps:
            return [total] * len(devices)
        work = self.rules.work.units(*units, split.first_samples)
        parts = [self.rules.most_part(device) for device in devices]
        return [total if work <= part else int(total * part / work) for part in parts]


def even_out(
    total: int, most: Sequence[int], seconds: Callable[[int, int], float]
) -> tuple[int, ...] | None:
    """Shares from 1 to `most` that sum to `total` and make the largest of `seconds` small.

    `seconds(place, share)` grows with the share. None where no such shares exist.
    """
    if len(most) > total or min(most) < 1 or sum(most) < total:
        return None
    return hand_out(total, _head_start(total, most, seconds), most, seconds)


def _head_start(total: int, most: Sequence[int], seconds: Callable[[int, int], float]) -> list[int]:
    """Shares surely not too large: 1 each, or of many most of what the speeds suggest."""
    ones = [1] * len(most)
    if total <= FINE:
        return ones
    speeds = [1 / max(seconds(place, total), 1e-300) for place in range(len(most))]
    sure = [int(0.75 * total * speed / sum(speeds)) for speed in speeds]
    shares = [max(1, min(part, limit)) for part, limit in zip(sure, most, strict=True)]
    return shares if sum(shares) <= total else ones


@dataclass(frozen=True, slots=True, eq=False)
class SampleExchange:
    """Seconds a sample of one device over its fastest links, by the stage's first and last border.

    Attributes:
        received, sent: [2, L+1] occupation of its downlink and its uplink: row 0 by the border in
            front of the stage, row 1 by the one behind.
    """

    received: Floats
    sent: Floats

    def seconds(self, first: int, end: int) -> float:
        """Of a stage of units [first, end)."""
        received = self.received[0, first] + self.received[1, end]
        return float(max(received, self.sent[0, first] + self.sent[1, end]))


def exchange(cost: CostModel, devices: Sequence[int], device: int) -> SampleExchange:
    """Of `device` in a group of `devices`."""
    profile, count = cost.profile, cost.unit_count
    carried = np.array([0.0, *(unit.output_bytes for unit in profile.units[:-1]), 0.0])
    outside = [other for other in range(len(cost.devices)) if other not in devices]
    rates = cost.links.rates
    received, sent = np.zeros((2, count + 1)), np.zeros((2, count + 1))
    if outside:
        received[:] = carried / rates[outside, device].max()
        sent[:] = carried / rates[device, outside].max()
    if device != cost.holder:
        fed = rates[cost.holder, device]
        received[0, 0] = profile.input_bytes / fed
        received[1, count] = profile.target_bytes / fed
    return SampleExchange(received, sent)
