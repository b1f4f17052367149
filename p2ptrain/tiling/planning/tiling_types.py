"""The search's request, a tiling, and a candidate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from p2ptrain.plan.types.allocation import EVERY_ALLOCATION, Allocation
from p2ptrain.tiling.planning.tiling_cost import Costs
from p2ptrain.tiling.planning.tiling_problem import TileDevice, TilingProblem


@dataclass(frozen=True, slots=True)
class TilingRequest:
    """What stands around the tiles, and what was asked for.

    Attributes:
        grid: (rows, columns); None = what is best.
        borders: of the groups; () = what is best.
        every: all devices have tiles; one alone does not count.
        below: seconds; nothing slower is wanted.
        pieces: micro-batches of a mini-batch, a smaller last one as the part that it is; the
            question is about one of them.
        holder: the device that has the images; None = the fastest.
        allocations: how devices behind the tiles may share a stage.
    """

    grid: tuple[int, int] | None = None
    borders: tuple[int, ...] = ()
    every: bool = False
    below: float = inf
    pieces: float = 1.0
    holder: TileDevice | None = None
    allocations: frozenset[Allocation] = EVERY_ALLOCATION


@dataclass(frozen=True, slots=True)
class Tiling:
    """A way to run the first units.

    Attributes:
        devices: names, in the order of their tiles; one name = that device computes all, untiled.
        shares: tiles of each, in row order.
        grid: (rows, columns).
        rows, columns: parts of the maps' height and width.
        aligned: how lines are carried from map to map.
        borders: of the groups, in units; () where nothing is tiled.
        early: those of them where halos travel with statistics, ascending.
        seconds: simulated, of a mini-batch, what is behind the tiles included.
        bound: what no tiling of the tiled units undercuts, the rest included.
        memory_bytes: by device, of the tiled units alone.
        reason: why this one.
        behind: the device that computes the rest; "" = one without tiles.
    """

    devices: tuple[str, ...]
    shares: tuple[int, ...]
    grid: tuple[int, int]
    rows: tuple[float, ...]
    columns: tuple[float, ...]
    aligned: bool
    borders: tuple[int, ...]
    seconds: float
    bound: float
    memory_bytes: tuple[float, ...]
    reason: str
    early: tuple[int, ...] = ()
    behind: str = ""

    @property
    def is_tiled(self) -> bool:
        """Whether several devices share the maps."""
        return len(self.devices) > 1


@dataclass(frozen=True, slots=True)
class TilingCandidate:
    """What may be tried: so many units on some devices.

    Attributes:
        devices: in the order of their tiles.
        whole: seconds of a mini-batch, of the tiles in these groups and of all that follows;
            infinite where it does not fit the memory.
        bound: what none of its grids undercuts, the same.
        behind: the device with what follows first, which may have tiles.
    """

    problem: TilingProblem
    devices: tuple[TileDevice, ...]
    whole: Callable[[Costs, tuple[int, ...]], float]
    bound: float
    behind: TileDevice


class Rest(Protocol):
    """What is not tiled, on one device that may have tiles too."""

    def alone(self, device: TileDevice, units: int) -> float:
        """Seconds of a mini-batch, of all behind the first `units`."""

    def held_bytes(self, units: int) -> float:
        """What that takes of the device's memory."""

    def whole(self, device: TileDevice, costs: Costs, borders: tuple[int, ...]) -> float:
        """Seconds of a mini-batch, tiles included."""
