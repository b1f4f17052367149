"""What a device of a group sends and receives for each of its samples, at best.

Shares by computing time alone would give a fast device behind a slow link more than that link can
carry. Devices compute and communicate at once, so a device's round takes the longer of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2ptrain.plan.cost import CostModel

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
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

    def table(self, cuts: NDArray[np.int64]) -> Floats:
        """[C, C] of stages between two of `cuts`."""
        received = self.received[0, cuts][:, None] + self.received[1, cuts][None, :]
        sent = self.sent[0, cuts][:, None] + self.sent[1, cuts][None, :]
        longer: Floats = np.maximum(received, sent)
        return longer


def exchange(cost: CostModel, devices: Sequence[int], device: int) -> Exchange:
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
    return Exchange(received, sent)
