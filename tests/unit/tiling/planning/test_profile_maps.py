from __future__ import annotations

import pytest

from p2ptrain.plan.types.allocation import TileShape
from p2ptrain.plan.types.feature_maps import ELEMENTWISE
from p2ptrain.tiling.planning.profile_maps import copied_bytes
from tests.support.feature_maps import chain
from tests.support.tiling_examples import CONVOLUTION

SIZE = 48


@pytest.mark.parametrize(
    ("borders", "columns"),
    [((0, 4), 0), ((0, 1, 4), 27), ((0, 1, 2, 3, 4), 3 * 25)],
)
def test_a_map_with_its_halo_is_there_twice(borders: tuple[int, ...], columns: int) -> None:
    """Two tiles side by side: half the columns and one more for each convolution of a group."""
    network = chain([CONVOLUTION] * 4, SIZE)
    each = network.bytes_per_position((1,)) * SIZE * columns
    shape = TileShape((1.0,), (1.0, 1.0), borders)
    assert copied_bytes(network, shape, (1, 1)) == (each, each)
    assert copied_bytes(network, shape, (2,)) == (2 * each,)


def test_a_map_that_is_normalised_first_is_there_once_with_its_halo() -> None:
    network = chain([CONVOLUTION, ELEMENTWISE, CONVOLUTION], SIZE, statistics=(1,))
    halo = network.bytes_per_position((1,)) * SIZE
    shape = TileShape((1.0,), (1.0, 1.0), (0, 1, 3))
    assert copied_bytes(network, shape, (1, 1)) == (halo, halo)
