"""A question about tiles, from profiles and links: one micro-batch size on some devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median_high, median_low

from p2ptrain.plan.cluster import Link
from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.overheads import REFERENCE, Overheads
from p2ptrain.plan.split import BatchSplit
from p2ptrain.plan.tiling.problem import TileDevice, TilingProblem
from p2ptrain.tiles.network import MapNetwork

MESSAGE_OF_MEASURED = 0.35
"""A message between tiles costs so much of what a device's yardsticks say: those to and from
several devices are made, sent and read in the same turns of the event loop. 0.25 ms of a core for
0.75 with six devices (`tools/tile_speed`, processor time of the loop's thread)."""
BYTE_OF_MEASURED = 0.7
"""The same of a byte: 4 ns for 5.8, as large messages leave the caches alone."""


@dataclass(frozen=True, slots=True)
class Setting:
    """See the module.

    Attributes:
        reference: the device that the question's times are of, the fastest.
    """

    cost: CostModel
    network: MapNetwork
    split: BatchSplit
    devices: tuple[int, ...]
    reference: int

    @staticmethod
    def of(
        cost: CostModel, network: MapNetwork, split: BatchSplit, devices: Iterable[int]
    ) -> Setting:
        """With the fastest of `devices` as the reference."""
        used, samples = tuple(devices), split.first_samples
        fastest = min(used, key=lambda d: (map_seconds(cost, network, d, samples), d))
        return Setting(cost, network, split, used, fastest)

    @property
    def problem(self) -> TilingProblem:
        """About one full micro-batch."""
        cost, network = self.cost, self.network
        count, samples = len(network.units), self.split.first_samples
        times = cost.unit_times(self.reference, samples)
        return TilingProblem(
            network=network,
            forward=tuple(times.forward[:count]),
            backward=tuple(times.backward[:count]),
            kept_bytes=tuple(float(unit.activation_bytes) for unit in cost.profile.units[:count]),
            samples=samples,
            link=_slowest(cost, self.devices),
            optimizer_state_ratio=cost.profile.optimizer_state_ratio,
            overheads=_overheads(cost, self.reference),
        )

    def tile_devices(self) -> list[TileDevice]:
        """As the question sees them."""
        devices = self.cost.devices
        return [
            TileDevice(devices[d].name, self.slowdown(d), devices[d].memory_bytes)
            for d in self.devices
        ]

    def slowdown(self, device: int) -> float:
        """By what the tiled units take."""
        return max(self._whole(device) / max(self._whole(self.reference), 1e-12), 1e-9)

    def _whole(self, device: int) -> float:
        return map_seconds(self.cost, self.network, device, self.split.first_samples)


def map_seconds(cost: CostModel, network: MapNetwork, device: int, samples: int) -> float:
    """Forward and backward of all the units that may be tiled, on that device."""
    times, count = cost.unit_times(device, samples), len(network.units)
    return sum(times.forward[:count]) + sum(times.backward[:count])


def _slowest(cost: CostModel, devices: Sequence[int]) -> Link:
    """The slowest device's, whose own is the median of those to the others.

    A slow device has slow links to all; one slow pair among many is a measurement that something
    came between.
    """
    if len(devices) < 2:
        return Link(inf, 0.0)
    rates, latencies = [], []
    for device in devices:
        pairs = [(a, b) for other in devices for a, b in ((device, other), (other, device))]
        links = [cost.links.link(a, b) for a, b in pairs if a != b]
        rates.append(median_low(link.bytes_per_s for link in links))
        latencies.append(median_high(link.latency_s for link in links))
    return Link(min(rates), max(latencies))


def _overheads(cost: CostModel, device: int) -> Overheads:
    """Messages are most of what tiles cost, so the plain model counts them too."""
    found = cost.devices[device]
    measured = found.overheads
    if measured is None:
        return REFERENCE.times_slowdown(found.slowdown)
    return replace(
        measured,
        message_seconds=MESSAGE_OF_MEASURED * measured.message_seconds,
        byte_seconds=BYTE_OF_MEASURED * measured.byte_seconds,
    )
