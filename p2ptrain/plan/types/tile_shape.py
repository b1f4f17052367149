"""How a stage's maps are cut: the lines and groups that all of its devices must know, as data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2ptrain.errors import OptionError
from p2ptrain.net.forms import Count

MAX_TILES = 4096
"""Of one stage; a device works out what every tile sends to every other one."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """A grid with its lines, and the groups between halos.

    Attributes:
        rows, columns: parts of the maps' height and width, one a row or column of the grid.
        borders: of the groups in units, from 0 to the number of tiled units, ascending.
        aligned: how lines are carried from map to map (`tiles.lines`).
        early: those of the borders where halos travel with the last statistics of the unit in
            front (`MapNetwork.with_early`), ascending.
    """

    rows: tuple[float, ...]
    columns: tuple[float, ...]
    borders: tuple[Count, ...]
    aligned: bool = True
    early: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        """Raises OptionError: it is no grid, or the groups do not follow each other."""
        for name, parts in (("rows", self.rows), ("columns", self.columns)):
            if not parts or any(not (part > 0 and math.isfinite(part)) for part in parts):
                raise OptionError(f"{name} of a grid have parts above 0, found {list(parts)}")
        if self.tiles > MAX_TILES:
            raise OptionError(f"a grid has at most {MAX_TILES} tiles, found {self.tiles}")
        ascending = all(first < end for first, end in pairwise(self.borders))
        if len(self.borders) < 2 or self.borders[0] != 0 or not ascending:
            raise OptionError(
                f"groups follow each other from unit 0 on, found borders {list(self.borders)}"
            )
        inner = self.borders[1:-1]
        if list(self.early) != sorted({*self.early}) or not {*self.early} <= {*inner}:
            raise OptionError(
                f"halos travel early at borders between two groups, found {list(self.early)}"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns)."""
        return len(self.rows), len(self.columns)

    @property
    def tiles(self) -> int:
        """How many."""
        return len(self.rows) * len(self.columns)

    @property
    def units(self) -> int:
        """How many units are tiled."""
        return self.borders[-1]

    def areas(self, shares: Sequence[int]) -> tuple[float, ...]:
        """Part of the maps that each device has; `shares`: tiles of each, in row order."""
        whole = sum(self.rows) * sum(self.columns)
        parts = [row * column / whole for row in self.rows for column in self.columns]
        found, first = [], 0
        for share in shares:
            found.append(sum(parts[first : first + share]))
            first += share
        return tuple(found)


def owners(shares: Sequence[int]) -> tuple[int, ...]:
    """By tile, in row order, the place of the device that has it."""
    return tuple(place for place, share in enumerate(shares) for _ in range(share))
