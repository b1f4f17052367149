"""The question: units to tile, how long they take, and the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from p2ptrain.errors import OptionError
from p2ptrain.plan.cluster import Link
from p2ptrain.plan.overheads import REFERENCE, Overheads
from p2ptrain.plan.tiling.links import TileLinks
from p2ptrain.tiles.network import MapNetwork

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
        optimizer_state_ratio: optimizer bytes per parameter byte.
        overheads: of the reference device, between tiles.
        sums: the same of adding up the filters' gradients: few large messages, as in any group.
        links: of the devices by name, those without tiles among them; None = all are `link`.
    """

    network: MapNetwork
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    samples: int
    link: Link
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
    def parameter_bytes(self) -> int:
        """Of all filters: every device holds them, and their gradients are added up."""
        return sum(unit.parameter_bytes for unit in self.network.units)

    @property
    def filter_memory_bytes(self) -> float:
        """Of the filters on each device: with their gradients and the optimizer's state."""
        return self.parameter_bytes * (2.0 + self.optimizer_state_ratio)

    @property
    def seconds(self) -> float:
        """Of all units, forward and backward, on the reference device alone."""
        return sum(self.forward) + sum(self.backward)

    def between(self, sender: str, receiver: str) -> Link:
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
