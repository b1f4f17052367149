"""What a tile keeps for its backward: each map once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from p2ptrain.model.graph.nodes import Argument, NodeRef, StateRef
from p2ptrain.tiling.grid import GridLayout
from p2ptrain.tiling.kernels.read_tiled_part import read_tiled_part
from p2ptrain.tiling.kernels.recorded_segment import RecordedSegment
from p2ptrain.tiling.kernels.tile_pass import TilePass
from p2ptrain.tiling.kernels.tile_program import TileProgram
from p2ptrain.tiling.kernels.tile_steps import TileMessage
from tests.support.tiled_descriptions import CHANNELS, HEIGHT, IMAGE, WIDTH, convolution, describe
from tests.support.tiling_in_process import replica

SAMPLES = 2
COLUMN_BYTES = SAMPLES * CHANNELS * HEIGHT * 4
RUNNING = StateRef("running_mean"), StateRef("running_var")
NORMALISED = NodeRef(0), None, None, *RUNNING, True, 0.1, 1e-5, False
HALVES = ([1.0], [1.0, 1.0])

Kept = dict[int, int]
"""Address -> bytes."""


@contextmanager
def counting(kept: Kept) -> Iterator[None]:
    """Collect the storages that autograd keeps."""

    def saved(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        yield


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Of their memory."""
    return [tensor.untyped_storage().data_ptr() for tensor in tensors]


def kept_bytes(kept: Kept, without: set[int]) -> int:
    """Together; `without`: addresses that do not count."""
    return sum(size for address, size in kept.items() if address not in without)


def programs(second: str, *more: Argument) -> list[TileProgram]:
    """Two tiles side by side; a group is the image's convolution, the other what follows it.

    `second`: an operator of one map, between a normalisation and a convolution.
    """
    description = describe(
        [
            convolution(IMAGE),
            ("aten.batch_norm.default", NORMALISED),
            (second, (NodeRef(1), *more)),
            convolution(NodeRef(2)),
            ("aten.mean.default", (NodeRef(3),)),
        ],
        cuts=[1, 4],
        tensors={reference.name: (CHANNELS,) for reference in RUNNING},
    )
    part = read_tiled_part(description)
    layout = GridLayout(part.network, HALVES, (0, 1, 2))
    state = {t.name: torch.ones(t.shape) for t in description.tensors}
    tensors = replica(description, part, state)
    return [TileProgram(description, part, layout, t, tensors) for t in range(2)]


def forward(tiles: list[TileProgram], kept: Kept) -> list[TilePass]:
    """`kept` gains what autograd keeps of the first tile."""
    torch.manual_seed(2)
    image = torch.randn(SAMPLES, CHANNELS, HEIGHT, WIDTH)
    passes = [TilePass(program, SAMPLES) for program in tiles]
    told: list[list[TileMessage]] = [[], []]

    def go_on(tile: int, *messages: TileMessage) -> None:
        with counting(kept if tile == 0 else {}):
            for message in messages:
                told[1 - tile] += passes[tile].receive(message)

    for tile, program in enumerate(tiles):
        columns = program.layout.input_region(tile, 0).columns
        part = image[..., columns.first : columns.end].contiguous()
        with counting(kept if tile == 0 else {}):
            told[1 - tile] += passes[tile].begin_forward({0: part})
    while any(told):
        for tile in range(2):
            waiting, told[tile] = told[tile], []
            go_on(tile, *waiting)
    return passes


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [("aten.relu.default", ()), ("aten.relu_.default", ()), ("aten.leaky_relu_.default", (0.1,))],
)
def test_a_map_that_is_padded_by_hand_is_kept_once(
    operator: str, arguments: tuple[Argument, ...]
) -> None:
    """The left tile has 6 columns with its halo, and zeros at the map's border."""
    tiles, kept = programs(operator, *arguments), Kept()
    passes = forward(tiles, kept)
    filters = {*addresses(tiles[0].tensors.values())}
    assert kept_bytes(kept, filters) == (7 + 7) * COLUMN_BYTES  # the image, and the rectifier's map
    (read,) = passes[0].kept
    assert read.nbytes == 6 * COLUMN_BYTES  # by the normalisation


def test_what_is_not_of_zeros_zeros_is_padded_afterwards() -> None:
    tiles, kept = programs("aten.exp.default"), Kept()
    forward(tiles, kept)
    filters = {*addresses(tiles[0].tensors.values())}
    assert kept_bytes(kept, filters) == (7 + 6 + 7) * COLUMN_BYTES


def test_a_map_that_is_normalised_with_its_halo_is_there_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backward starts from its own part all the same, whose values are gone."""
    given: dict[int, StorageWeakRef] = {}
    leave = RecordedSegment.leave

    def spy(self: RecordedSegment, number: int, value: Tensor, *, owned: bool) -> Tensor:
        if owned:
            given[number] = StorageWeakRef(value.untyped_storage())
        return leave(self, number, value, owned=owned)

    monkeypatch.setattr(RecordedSegment, "leave", spy)
    tiles = programs("aten.relu.default")
    passes = forward(tiles, {})
    convolved, last = tiles[0].layout.network.operations[0].output, 4
    assert {number: ref.expired() for number, ref in given.items()} == {
        convolved: True,
        last: False,
    }
    assert last in passes[0].outputs
