"""All directed links of a cluster as two matrices: a thousand devices have a million of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2ptrain.plan.cluster import Cluster, Device, Link

Floats: TypeAlias = NDArray[np.float64]

TO_ITSELF = Link(bytes_per_s=math.inf, latency_s=0.0)
"""From a device to itself nothing takes time."""


class LinkTable:
    """The links between `devices`, by index.

    Attributes:
        rates: [n, n] float64 bytes/s from row to column; inf on the diagonal.
        latencies: [n, n] float64 seconds; 0 on the diagonal.
    """

    def __init__(self, cluster: Cluster, devices: Sequence[Device]) -> None:
        self._names = [device.name for device in devices]
        self._links: dict[tuple[int, int], Link] = {}
        self._cluster = cluster
        default = cluster.default_link or TO_ITSELF  # then every direction is listed
        shape = len(devices), len(devices)
        self.rates: Floats = np.full(shape, default.bytes_per_s)
        self.latencies: Floats = np.full(shape, default.latency_s)
        place = {name: i for i, name in enumerate(self._names)}
        for (sender, receiver), link in cluster.links.items():
            at = place[sender], place[receiver]
            self.rates[at], self.latencies[at] = link.bytes_per_s, link.latency_s
        np.fill_diagonal(self.rates, TO_ITSELF.bytes_per_s)
        np.fill_diagonal(self.latencies, TO_ITSELF.latency_s)

    def link(self, sender: int, receiver: int) -> Link:
        """That direction."""
        pair = sender, receiver
        link = self._links.get(pair)
        if link is None:
            link = self._links[pair] = self._between(sender, receiver)
        return link

    def _between(self, sender: int, receiver: int) -> Link:
        if sender == receiver:
            return TO_ITSELF
        return self._cluster.link(self._names[sender], self._names[receiver])

    def worst(self, devices: Sequence[int]) -> tuple[float, float]:
        """(least bytes/s, largest latency) over all ordered pairs of at least two devices."""
        pairs = np.ix_(devices, devices)
        return float(self.rates[pairs].min()), float(self.latencies[pairs].max())
