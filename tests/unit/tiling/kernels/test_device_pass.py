"""Which units are to blame for values that are not finite, by the maps that are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from p2ptrain.plan.types.feature_maps import ELEMENTWISE, FeatureMap, MapNetwork, MapUnit, Operation
from p2ptrain.tiling.kernels.device_pass import broken_units


def network() -> MapNetwork:
    """Map 0 -> 1 -> 2 -> 3 -> 5, and 1 -> 4 -> 5; each operation a unit."""
    reads = [(0,), (1,), (2,), (1,), (3, 4)]
    operations = tuple(
        Operation(f"op{k}", read, k + 1, ELEMENTWISE, ELEMENTWISE) for k, read in enumerate(reads)
    )
    maps = tuple(FeatureMap(f"map{k}", 1, 4, 4) for k in range(6))
    return MapNetwork(
        maps, operations, tuple(MapUnit(f"unit{k}", k, k + 1) for k in range(5)), (0,), (5,)
    )


@pytest.mark.parametrize(
    ("finite", "broken", "units"),
    [
        ([0, 5], [], None),
        ([], [0, 5], range(0)),
        ([0], [5], range(5)),
        ([], [5], range(5)),
        ([0, 1, 2], [3, 5], range(2, 3)),
        ([0, 1], [3, 5], range(1, 3)),
        ([0, 3], [5], range(5)),
        ([0, 1, 3], [5], range(3, 5)),
    ],
)
def test_units_between_what_is_finite_and_the_first_that_is_not(
    finite: Sequence[int], broken: Sequence[int], units: range | None
) -> None:
    known = dict.fromkeys(finite, True) | dict.fromkeys(broken, False)
    assert broken_units(network(), known) == units
