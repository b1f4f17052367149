"""The question: units to tile, how long they take, the devices and the links that tiles use.

`TileTraffic` is what goes in and out of tiles (images, last maps, their gradients) and which
devices get the last maps; `GroupCost` what crosses between devices inside, and what a group of
units takes with it. `describe_refusals` sums up why nothing fits: many ways are tried, and most
fail for one reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median_high, median_low

from p2ptrain.errors import OptionError, PlanError, size_text
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.types.cluster import REFERENCE, ClusterLink, Overheads
from p2ptrain.plan.types.feature_maps import MapNetwork
from p2ptrain.plan.types.profile import StateBytes

OF_TILES = replace(REFERENCE, message_seconds=3e-4, byte_seconds=2.5e-9)
"""One core of a server, of messages between tiles: several are made and read in the same turns of
the event loop, and edges are copied out of maps and into them."""


@dataclass(frozen=True, slots=True)
class TileDevice:
    """One device.

    Attributes:
        slowdown: its time is the reference device's times this.
        memory_bytes: what it may use for the tiled part.
    """

    name: str
    slowdown: float = 1.0
    memory_bytes: float = float("inf")


@dataclass(frozen=True, slots=True)
class TilingProblem:
    """See the module.

    Attributes:
        network: the units that can be tiled; all of them are.
        forward, backward: by unit: seconds of the whole maps on the reference device, for
            `samples` samples.
        kept_bytes: by unit: what is kept for the backward of the whole maps, one sample.
        samples: of a mini-batch, which is one micro-batch here.
        link: between any two of the devices that have tiles: the slowest.
        optimizer_state_ratio: optimizer bytes per trained byte.
        overheads: of the reference device, between tiles.
        sums: the same of adding up the filters' gradients: few large messages, as in any group.
        links: of the devices by name, those without tiles among them; None = all are `link`.
    """

    network: MapNetwork
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    samples: int
    link: ClusterLink
    optimizer_state_ratio: float = 0.0
    overheads: Overheads = OF_TILES
    sums: Overheads = REFERENCE
    links: TileLinks | None = None

    def __post_init__(self) -> None:
        counts = {len(self.forward), len(self.backward), len(self.kept_bytes)}
        if counts != {len(self.network.units)} or self.samples < 1:
            raise OptionError(
                f"{len(self.network.units)} units need as many times and sizes, found {counts}; "
                f"and {self.samples} samples must be at least 1"
            )

    @property
    def filters(self) -> StateBytes:
        """All of them: every device holds them, and their gradients are added up."""
        units = self.network.units
        parameter_bytes = sum(unit.parameter_bytes for unit in units)
        frozen_bytes = sum(unit.frozen_bytes for unit in units)
        trainable_bytes = parameter_bytes - frozen_bytes
        return StateBytes(parameter_bytes, trainable_bytes, self.optimizer_state_ratio)

    @property
    def seconds(self) -> float:
        """Of all units, forward and backward, on the reference device alone."""
        return sum(self.forward) + sum(self.backward)

    def between(self, sender: str, receiver: str) -> ClusterLink:
        """From one device to another."""
        return self.link if self.links is None else self.links.between(sender, receiver)

    def among(self, devices: Sequence[TileDevice]) -> TilingProblem:
        """The same question where these devices have tiles."""
        if self.links is None:
            return self
        return replace(self, link=self.links.among([device.name for device in devices]))

    def first_units(self, count: int) -> TilingProblem:
        """The same question about the first `count` units only."""
        return replace(
            self,
            network=self.network.first_units(count),
            forward=self.forward[:count],
            backward=self.backward[:count],
            kept_bytes=self.kept_bytes[:count],
        )


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

    def between(self, sender: str, receiver: str) -> ClusterLink:
        """That direction."""
        return self.cost.link(self.places[sender], self.places[receiver])

    def among(self, names: Sequence[str]) -> ClusterLink:
        """What stands for all links between these devices, as all wait for the slowest.

        The least rate and the largest latency of all ordered pairs. What `train` has measured is
        not that certain: one slow pair among many is a measurement that something came between,
        while a slow device has slow links to all. So there each device counts with the median of
        its links. Devices of one machine share its interface with one another, as far as what they
        send leaves the machine.
        """
        devices = [self.places[name] for name in names]
        if len(devices) < 2:
            return ClusterLink(inf, 0.0)
        link = self._slowest(devices)
        sharing = Counter(self.cost.interfaces(device, device)[0] for device in devices)
        share = max(sharing.values()) if len(sharing) > 1 else 1
        return replace(link, bytes_per_s=link.bytes_per_s / share)

    def _slowest(self, devices: Sequence[int]) -> ClusterLink:
        if self.cost.overlap is None:
            return ClusterLink(*self.cost.links.worst(devices))
        rates, latencies = [], []
        for device in devices:
            pairs = [(a, b) for other in devices for a, b in ((device, other), (other, device))]
            links = [self.cost.link(a, b) for a, b in pairs if a != b]
            rates.append(median_low(link.bytes_per_s for link in links))
            latencies.append(median_high(link.latency_s for link in links))
        return ClusterLink(min(rates), max(latencies))


@dataclass(frozen=True, slots=True)
class Passage:
    """What goes between all tiles and one device, which sends or receives one after the other.

    Attributes:
        parts: (device with tiles, seconds that the link carries what is its), in their order.
        latency_s: until the last of it has arrived.
    """

    parts: tuple[tuple[int, float], ...]
    latency_s: float

    @property
    def carried_seconds(self) -> float:
        """That links carry it."""
        return sum(seconds for _, seconds in self.parts)

    @property
    def seconds(self) -> float:
        """Until all of it has arrived."""
        return self.carried_seconds + self.latency_s


@dataclass(frozen=True, slots=True)
class Taker:
    """A device that computes with the last maps: with all of their samples, or with a part."""

    device: TileDevice
    part: float = 1.0


@dataclass(frozen=True, slots=True)
class TileTraffic:
    """Messages that cross between devices at one moment, one way.

    Attributes:
        sent, received: bytes by device.
        messages: by device, at both ends together.
        waits_for: by device: those that it gets something from.
    """

    sent: tuple[float, ...]
    received: tuple[float, ...]
    messages: tuple[int, ...]
    waits_for: tuple[frozenset[int], ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing crosses."""
        return not any(self.messages)


@dataclass(frozen=True, slots=True)
class GroupCost:
    """One group.

    Attributes:
        forward, backward: by leg, in the order of the forward: seconds by device.
        halo: at its beginning, forward, with the statistics of what enters where the group begins
            with their operator; on the way back the same turned round.
        statistics: by leg but the last: what all devices tell each other behind it.
        memory: bytes kept for the backward, by device.
        seconds: the sum, see the module.
        work: seconds that all it computes takes the reference device alone.
        repeated: part of its work that is computed more than once.
    """

    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]
    halo: TileTraffic
    statistics: tuple[TileTraffic, ...]
    memory: tuple[float, ...]
    seconds: float
    work: float
    repeated: float


class NoTile(PlanError):
    """A device has no memory for any tile beside what it must hold in any case."""

    def __init__(self, name: str, needed_bytes: float, offered_bytes: float) -> None:
        super().__init__(
            f"{name} has too little memory for a tile: it needs more than "
            f"{size_text(needed_bytes)} and has {size_text(offered_bytes)}; give it more, leave "
            "it out, or try --planner auto"
        )
        self.name, self.needed_bytes = name, needed_bytes


class NothingFits(PlanError):
    """No way that was tried; `reasons` are those of each."""

    def __init__(self, reasons: Sequence[PlanError]) -> None:
        super().__init__(describe_refusals(reasons))
        self.reasons = tuple(reasons)


def describe_refusals(reasons: Sequence[PlanError]) -> str:
    """Each once, and of a device without room for tiles only what it lacks where that is least."""
    least: dict[str, NoTile] = {}
    for reason in reasons:
        if isinstance(reason, NoTile):
            kept = least.setdefault(reason.name, reason)
            least[reason.name] = min(kept, reason, key=lambda one: one.needed_bytes)
    shown = [least[one.name] if isinstance(one, NoTile) else one for one in reasons]
    return "; ".join(dict.fromkeys(map(str, shown)))
