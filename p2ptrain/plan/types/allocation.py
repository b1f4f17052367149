"""How the devices of one stage divide its work: samples of each micro-batch, or whole ones.

samples          micro-batch of 6, shares 3 2 1       a a a b b c
                 a smaller last one of 4              a a a b
micro_batches    7 micro-batches, shares 4 2 1        m = 0 1 2 3 4 5 6
                                                          a b a c a b a
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import lru_cache
from heapq import heapify, heappop, heappush
from operator import add

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
    than MOST_STEPS whole blocks are dealt first, so that as many steps do for any number.
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
