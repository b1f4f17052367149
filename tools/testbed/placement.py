"""Which CPU each device computes on. Pure.

Every device has one CPU that it never leaves: a slice of its quota that one CPU holds is of no use
to its thread on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

_ROUNDING = 1e-9


def places(shares: Sequence[float], cpus: Sequence[int]) -> list[int]:
    """The CPU of each share: the fullest CPU is as empty as moves and swaps make it.

    The largest share first, always where most is left; then single shares move and pairs swap
    while that helps.

    Raises:
        ValueError: a share is not above 0 and at most 1, or some CPU would be oversold.
    """
    if not all(0 < share <= 1 for share in shares):
        raise ValueError(f"shares are of one core, above 0 and at most 1: {list(shares)}")
    chosen = _largest_first(shares, len(cpus))
    while better := _better(shares, chosen, len(cpus)):
        chosen = better
    if max(_loads(shares, chosen, len(cpus))) > 1 + _ROUNDING:
        raise ValueError(f"{len(cpus)} CPUs cannot give {list(shares)} of a core")
    return [cpus[place] for place in chosen]


def _largest_first(shares: Sequence[float], count: int) -> list[int]:
    loads = [0.0] * count
    chosen = [0] * len(shares)
    for device in sorted(range(len(shares)), key=lambda device: -shares[device]):
        chosen[device] = loads.index(min(loads))
        loads[chosen[device]] += shares[device]
    return chosen


def _better(shares: Sequence[float], chosen: list[int], count: int) -> list[int] | None:
    """One move or swap on, or None where none leaves the fuller of its two CPUs emptier."""
    loads = _loads(shares, chosen, count)
    for one, other in permutations(range(count), 2):
        for leaving in _on(chosen, one):
            for coming in (None, *_on(chosen, other)):
                moved = shares[leaving] - (0.0 if coming is None else shares[coming])
                fuller = max(loads[one] - moved, loads[other] + moved)
                if fuller < max(loads[one], loads[other]) - _ROUNDING:
                    return _exchanged(chosen, leaving, coming, (one, other))
    return None


def _exchanged(
    chosen: list[int], leaving: int, coming: int | None, places: tuple[int, int]
) -> list[int]:
    new = list(chosen)
    new[leaving] = places[1]
    if coming is not None:
        new[coming] = places[0]
    return new


def _on(chosen: list[int], place: int) -> list[int]:
    return [device for device, own in enumerate(chosen) if own == place]


def _loads(shares: Sequence[float], chosen: list[int], count: int) -> list[float]:
    return [sum(shares[device] for device in _on(chosen, place)) for place in range(count)]
