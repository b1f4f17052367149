"""How large units are where they are kept, updated, copied and sent.

What is not trained has no gradient, no state of the optimizer, and never changes:

    weights, all      |== frozen ==|== trained ==|
    gradients                      |== trained ==|
    optimizer state                |== trained ==| x optimizer_state_ratio

Every rule of that kind stands here; planners, copies and migrations only add up units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Of some units.

    Attributes:
        parameter_bytes: of all their weights.
        trainable_bytes: of those that take gradients.
        optimizer_state_ratio: optimizer bytes per trained byte.
    """

    parameter_bytes: int
    trainable_bytes: int
    optimizer_state_ratio: float = 0.0

    @property
    def frozen_bytes(self) -> int:
        """Of weights that never change: a device has them once, however many versions it keeps."""
        return self.parameter_bytes - self.trainable_bytes

    @property
    def trained(self) -> float:
        """What a device that trains them holds: weights, gradients and optimizer state."""
        return self.parameter_bytes + self.trainable_bytes * (1 + self.optimizer_state_ratio)

    @property
    def held_bytes(self) -> int:
        """The same, rounded up."""
        return math.ceil(self.trained)

    @property
    def changing_bytes(self) -> int:
        """What an update changes, and each further version repeats: rounded up."""
        return math.ceil(self.trainable_bytes * (1 + self.optimizer_state_ratio))

    @property
    def version_bytes(self) -> int:
        """One whole version: what a device needs that has none of it."""
        return self.frozen_bytes + self.changing_bytes

    @property
    def summed_bytes(self) -> int:
        """What a group adds up: the gradients."""
        return self.trainable_bytes
