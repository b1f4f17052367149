"""Shapes of a split network: from whom nothing reaches whom. Pure.

Devices are numbers, 0 has the data. A shape is asked for so many devices and the number of the one
that coordinates, and gives (sender, receiver) pairs; what is not in it gets through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import permutations
from types import MappingProxyType
from typing import Final, TypeAlias

from tools.testbed.network import Blocked

Shape: TypeAlias = Callable[[int, int], Blocked]


def parts(count: int, *away: Iterable[int]) -> Blocked:
    """Each of `away` is a part of its own, and so are all others together; both ways."""
    part = dict.fromkeys(range(count), 0)
    for number, devices in enumerate(away, 1):
        part |= dict.fromkeys(devices, number)
    return frozenset(pair for pair in permutations(range(count), 2) if _differ(part, pair))


def _differ(part: Mapping[int, int], pair: tuple[int, int]) -> bool:
    return part[pair[0]] != part[pair[1]]


def _ring(count: int, _coordinator: int) -> Blocked:
    """Each reaches its two neighbours: for five, each sees another majority."""
    apart = {
        (a, b) for a, b in permutations(range(count), 2) if (a - b) % count not in (1, count - 1)
    }
    return frozenset(apart)


def _mute(count: int, _coordinator: int) -> Blocked:
    return frozenset((count - 1, other) for other in range(count - 1))


def _deaf(count: int, _coordinator: int) -> Blocked:
    return frozenset((other, count - 1) for other in range(count - 1))


SHAPES: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        "one": lambda n, _: parts(n, [n - 1]),
        "halves": lambda n, _: parts(n, range(n - n // 2, n)),
        "majority": lambda n, _: parts(n, range(n // 2, n)),
        "third": lambda n, _: parts(n, *([d] for d in range(n - (n + 1) // 3, n))),
        "holder": lambda n, _: parts(n, range(1, n)),
        "leader": lambda n, coordinator: parts(n, [coordinator]),
        "ring": _ring,
        "mute": _mute,
        "deaf": _deaf,
    }
)
"""`third`: so many devices, each alone; `mute`: the last reaches none; `deaf`: none reaches it."""


def away(count: int, blocked: Blocked) -> frozenset[int]:
    """Devices that cannot speak with the one that has the data, in one direction or both."""
    return frozenset(d for d in range(1, count) if blocked & {(0, d), (d, 0)})
