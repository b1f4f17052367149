"""Every pipeline of groups there is on a tiny question, as arrays.

A structure is a sequence of disjoint groups and the borders between them; shares and depths follow
from them (`group_tables.py`) and are improved later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from math import comb

import numpy as np

from p2ptrain.plan.search.group_tables import Kind, Wholes


def every_kind(devices: Sequence[int]) -> tuple[Kind, ...]:
    """All groups of `devices`: alone, dividing samples, dealing micro-batches."""
    kinds = [Kind((device,)) for device in devices]
    for count in range(2, len(devices) + 1):
        for members in combinations(devices, count):
            kinds += [Kind(members), Kind(members, deals=True)]
    return tuple(kinds)


def sequences(kinds: Sequence[Kind], most: int) -> dict[int, list[tuple[int, ...]]]:
    """By length up to `most`: all sequences of kinds without a device in common."""
    masks = [sum(1 << device for device in kind.devices) for kind in kinds]
    found: dict[int, list[tuple[int, ...]]] = {1: [(k,) for k in range(len(kinds))]}
    for length in range(2, most + 1):
        longer = []
        for sequence in found[length - 1]:
            used = sum(masks[k] for k in sequence)
            longer += [(*sequence, k) for k, mask in enumerate(masks) if not mask & used]
        if not longer:
            break
        found[length] = longer
    return found


def pinned(
    found: dict[int, list[tuple[int, ...]]], kinds: Sequence[Kind], holder: int
) -> dict[int, list[tuple[int, ...]]]:
    """The holder alone, or in front of and behind sequences of groups that lack it."""
    own = kinds.index(Kind((holder,)))
    without = {k for k, kind in enumerate(kinds) if holder not in kind.devices}
    between = {
        length + 2: [(own, *sequence, own) for sequence in listed if without.issuperset(sequence)]
        for length, listed in found.items()
    }
    return {1: [(own,)], **between}


def count_structures(found: dict[int, list[tuple[int, ...]]], cuts: int) -> int:
    """How many structures those sequences have with that many borders, both ends included."""
    return sum(len(listed) * comb(cuts - 2, length - 1) for length, listed in found.items())


def every_structure(
    found: dict[int, list[tuple[int, ...]]], cuts: int
) -> Iterator[tuple[Wholes, Wholes]]:
    """(kinds, cuts) of all structures, by number of stages."""
    for length, listed in sorted(found.items()):
        borders = _borders(combinations(range(1, cuts - 1), length - 1), cuts)
        if len(borders) and listed:
            kinds = np.repeat(np.array(listed), len(borders), axis=0)
            yield kinds, np.tile(borders, (len(listed), 1))


def _borders(inner: Iterable[tuple[int, ...]], cuts: int) -> Wholes:
    return np.array([(0, *cut, cuts - 1) for cut in inner], dtype=np.int64)
