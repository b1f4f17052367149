"""What goes in and out of tiles: images, the last maps, their gradients; and who gets the maps."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.plan.tiling.problem import TileDevice


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
    """A device that goes on with the last maps: with all of their samples, or with a part."""

    device: TileDevice
    part: float = 1.0
