"""The links that tiles use: between those that have some, and to and from those at the two ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median_high, median_low

from p2ptrain.plan.cluster import Link
from p2ptrain.plan.cost import CostModel


@dataclass(frozen=True, slots=True)
class TileLinks:
    """Those of a cluster, by names of devices.

    Attributes:
        places: indexes of the devices.
    """

    cost: CostModel
    places: Mapping[str, int]

    @staticmethod
    def of(cost: CostModel) -> TileLinks:
        """All of them."""
        return TileLinks(cost, {device.name: d for d, device in enumerate(cost.devices)})

    def between(self, sender: str, receiver: str) -> Link:
        """That direction."""
        return self.cost.link(self.places[sender], self.places[receiver])

    def among(self, names: Sequence[str]) -> Link:
        """What stands for all links between these devices, as everybody waits for the slowest.

        The least rate and the largest latency of all ordered pairs. What `train` has measured is
        not that certain: one slow pair among many is a measurement that something came between,
        while a slow device has slow links to all. So there each device counts with the median of
        its links.
        """
        devices = [self.places[name] for name in names]
        if len(devices) < 2:
            return Link(inf, 0.0)
        if self.cost.overlap is None:
            return Link(*self.cost.links.worst(devices))
        rates, latencies = [], []
        for device in devices:
            pairs = [(a, b) for other in devices for a, b in ((device, other), (other, device))]
            links = [self.cost.link(a, b) for a, b in pairs if a != b]
            rates.append(median_low(link.bytes_per_s for link in links))
            latencies.append(median_high(link.latency_s for link in links))
        return Link(min(rates), max(latencies))
