"""How long what devices send in a round occupies their interfaces."""

from __future__ import annotations

from p2ptrain.plan.cost.cost_model import CostModel


class InterfaceLoads:
    """Each uplink and downlink; what is sent occupies one of either, to itself none.

    Attributes:
        up, down: seconds by `CostModel.interfaces`.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.up = [0.0] * (2 * len(cost.devices))
        self.down = [0.0] * (2 * len(cost.devices))

    @property
    def longest(self) -> float:
        """Of all of them."""
        return max(*self.up, *self.down)

    def of(self, device: int) -> float:
        """Of the longer one of a device's two."""
        own, _ = self._cost.interfaces(device, device)
        return max(self.up[own], self.down[own])

    def carry(self, sender: int, receiver: int, size: float) -> None:
        """So many bytes go one way."""
        if sender != receiver:
            seconds = size / self._cost.link(sender, receiver).bytes_per_s
            up, down = self._cost.interfaces(sender, receiver)
            self.up[up] += seconds
            self.down[down] += seconds

    def exchange(self, one: int, other: int, size: float) -> None:
        """Values go to the next stage, and as many bytes of gradients come back."""
        self.carry(one, other, size)
        self.carry(other, one, size)
