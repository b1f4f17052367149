"""Which CPU each device computes on. Pure.

Every device has one CPU that it never leaves: a slice of its quota that one CPU holds is of no use
to its thread on another.
"""

from __future__ import annotations

from collections.abc import Sequence

_ROUNDING = 1e-9


def places(shares: Sequence[float], cpus: Sequence[int]) -> list[int]:
    """The CPU of each share, the largest placed first, always where most is left.

    Raises:
        ValueError: a share is not above 0 and at most 1, or some CPU would be oversold.
    """
    if not all(0 < share <= 1 for share in shares):
        raise ValueError(f"shares are of one core, above 0 and at most 1: {shares}")
    left = dict.fromkeys(cpus, 1.0)
    chosen: dict[int, int] = {}
    for device in sorted(range(len(shares)), key=lambda device: -shares[device]):
        cpu = max(left, key=left.__getitem__)
        left[cpu] -= shares[device]
        if left[cpu] < -_ROUNDING:
            raise ValueError(f"{len(cpus)} CPUs cannot give {list(shares)} of a core")
        chosen[device] = cpu
    return [chosen[device] for device in range(len(shares))]
