"""How a mini-batch falls into micro-batches, and how the devices of one stage divide those.

samples          micro-batch of 6, shares 3 2 1       a a a b b c
                 a smaller last one of 4              a a a b
micro_batches    7 micro-batches, shares 4 2 1        m = 0 1 2 3 4 5 6
                                                          a b a c a b a
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from operator import add

from p2ptrain.errors import OptionError
from p2ptrain.net.forms import Count

MAX_MICRO_BATCHES = 100_000
"""Of a round, in questions and plans from outside: each has tasks on every stage, and millions of
tasks would take minutes and all memory to simulate."""

MAX_SAMPLES = 10**12
"""Of a mini-batch or a piece of one, in questions and plans from outside: more than any memory
holds, and still exact in floating point."""


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """`batch_size` samples in micro-batches of `micro_batch`, the last one possibly smaller.

    A micro-batch larger than the batch is the whole batch.
    """

    batch_size: int
    micro_batch: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise OptionError(f"batch_size must be at least 1, found {self.batch_size}")
        if self.micro_batch < 1:
            raise OptionError(f"micro_batch must be at least 1, found {self.micro_batch}")

    def checked(self) -> BatchSplit:
        """This one. Raises OptionError where a round of it cannot be simulated."""
        check_samples("micro_batch", self.first_samples)
        if self.micro_batches > MAX_MICRO_BATCHES:
            raise OptionError(
                f"{self.micro_batches} micro-batches of {self.micro_batch} samples are more than "
                f"{MAX_MICRO_BATCHES}: choose larger ones, or a smaller batch"
            )
        return self

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a round."""
        return -(-self.batch_size // self.micro_batch)

    @property
    def first_samples(self) -> int:
        """Samples of every micro-batch but the last."""
        return min(self.micro_batch, self.batch_size)

    @property
    def last_samples(self) -> int:
        """Samples of the last micro-batch."""
        return self.batch_size - (self.micro_batches - 1) * self.micro_batch

    def samples(self, micro_batch: int) -> int:
        """Samples of micro-batch number `micro_batch`, counted from 0."""
        is_last = micro_batch == self.micro_batches - 1
        return self.last_samples if is_last else self.micro_batch

    def in_flight_samples(self, warmup: int) -> int:
        """Most samples forwarded and not yet backwarded with that warm-up depth."""
        return min(warmup * self.micro_batch, self.batch_size)

    def deepest(self, samples: int) -> int:
        """The deepest warm-up that keeps at most `samples` in flight; 0 = not even one."""
        if samples >= self.batch_size:
            return self.micro_batches
        return min(samples // self.micro_batch, self.micro_batches - 1)


def check_samples(name: str, samples: int) -> None:
    """Raises OptionError for more than a mini-batch, or a piece of one, may have."""
    if samples > MAX_SAMPLES:
        raise OptionError(f"{name} must be at most {MAX_SAMPLES:,}, found {samples}")


MAX_STEPS = 1024
"""In which a number of samples or micro-batches is handed out, about: a thousandth is no matter."""


class Allocation(StrEnum):
    """What the shares of a stage's devices count."""

    SAMPLES = "samples"
    """Samples of each micro-batch; the shares sum to `micro_batch`."""
    MICRO_BATCHES = "micro_batches"
    """Whole micro-batches of a round; the shares sum to `micro_batches`."""
    TILES = "tiles"
    """Tiles of every map, in row order; shares sum to the grid (docs/internals/tiling.md)."""


EVERY_ALLOCATION = frozenset({Allocation.SAMPLES, Allocation.MICRO_BATCHES})
"""Both ways for a group of any units; tiles are for the first ones that allow it."""


def sample_ranges(shares: Sequence[int], samples: int) -> tuple[tuple[int, int], ...]:
    """[first, end) samples of each device in a micro-batch of `samples`, in the order of shares.

    A smaller last micro-batch ends the ranges early, so that the last devices may get nothing.
    """
    ranges, end = [], 0
    for share in shares:
        first, end = end, end + share
        ranges.append((min(first, samples), min(end, samples)))
    return tuple(ranges)


@lru_cache(maxsize=4096)
def deal(shares: tuple[int, ...]) -> tuple[int, ...]:
    """The place (in `shares`) of the device that takes each of sum(shares) micro-batches.

    Micro-batch m goes where (m+1)·share - M·dealt is largest, ties to the first listed: weighted
    round robin, with every device's part spread evenly over the round.
    """
    count = sum(shares)
    due = [0] * len(shares)  # (m+1)·share - M·dealt
    places = []
    for _ in range(count):
        due = list(map(add, due, shares))
        place = due.index(max(due))
        due[place] -= count
        places.append(place)
    return tuple(places)


@lru_cache(maxsize=256)
def _dealt(shares: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The micro-batches of each place, ascending."""
    own: list[list[int]] = [[] for _ in shares]
    for m, place in enumerate(deal(shares)):
        own[place].append(m)
    return tuple(tuple(numbers) for numbers in own)


@lru_cache(maxsize=4096)
def max_in_window(shares: tuple[int, ...], place: int, window: int) -> tuple[int, bool]:
    """Most micro-batches dealt to `place` among any `window` consecutive ones.

    And whether every such window contains the round's last micro-batch, which may be smaller.
    """
    own, last = _dealt(shares)[place], sum(shares) - 1
    most, without_last, oldest = 0, 0, 0
    for newest, m in enumerate(own):  # a fullest window ends with one of its own
        while own[oldest] <= m - window:
            oldest += 1
        held = newest - oldest + 1
        most = max(most, held)
        if m < last:
            without_last = max(without_last, held)
    return most, without_last < most


def hand_out(
    total: int, shares: Sequence[int], most: Sequence[int], seconds: Callable[[int, int], float]
) -> tuple[int, ...]:
    """`shares`, raised one at a time to sum to `total`: always who finishes the next one first.

    `seconds(place, share)` grows with the share, so that the last to finish does so as early as it
    can from these shares. No share is raised above `most`, whose sum is at least `total`. Of more
    than MAX_STEPS whole blocks are dealt first, so that as many steps do for any number.
    """
    raised = list(shares)
    while (left := total - sum(raised)) > 0:
        _hand_out_blocks(left, max(1, left // MAX_STEPS), raised, most, seconds)
    return tuple(raised)


def _hand_out_blocks(
    left: int,
    block: int,
    raised: list[int],
    most: Sequence[int],
    seconds: Callable[[int, int], float],
) -> None:
    """As many of `left` as are whole blocks, in place; a block is less where `most` is."""

    def offer(i: int) -> tuple[float, int, int]:
        after = min(raised[i] + block, most[i])
        return seconds(i, after), i, after

    open_places = [offer(i) for i, share in enumerate(raised) if share < most[i]]
    heapify(open_places)
    for _ in range(left // block):
        _, i, after = heappop(open_places)
        raised[i] = after
        if after < most[i]:
            heappush(open_places, offer(i))
        elif not open_places:
            return


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
