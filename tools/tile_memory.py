"""What a tile keeps for its backward, beside what one device keeps of the whole maps.

    python -m tools.tile_memory [--grids 1x2,2x3,4x6] [--side 416]

The first 16 layers of YOLOv2 (tools/darknet), one sample, a group a unit. Counted is the memory of
all tensors that are kept between forward and backward, without filters; of tiles, the largest.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2ptrain.model.capture import capture
from p2ptrain.model.captured import Captured
from p2ptrain.model.tiles.cutting import cut_where_tiling_ends
from p2ptrain.model.tiles.messages import Message
from p2ptrain.model.tiles.program import Replica, TileProgram
from p2ptrain.model.tiles.tile_pass import TilePass
from p2ptrain.tiles.layout import Layout
from tools.darknet.cfg import read_cfg
from tools.darknet.network import Darknet
from tools.tile_crossover import YOLOV2

Kept = dict[int, int]
"""Address -> bytes."""


class Scored(nn.Module):
    """The network with something to compare to a label behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Darknet(read_cfg(YOLOV2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean((2, 3))


def main() -> int:
    """Print a line a grid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grids", default="1x2,2x3,4x6", help="rows x columns, with commas")
    parser.add_argument("--side", type=int, default=416, help="of the images")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x, y = torch.randn(2, 3, arguments.side, arguments.side), torch.tensor([0, 1])
    model = Scored().train()
    captured = capture(model, functional.cross_entropy, (x, y), evaluation=False)
    whole: Kept = {}
    with counting(whole):
        loss = functional.cross_entropy(model(x[:1]), y[:1])
    filters = set(addresses(model.parameters()))
    alone = kept_bytes(whole, filters)
    print(f"one device: {alone / 1e6:.1f} MB")
    del loss
    for grid in arguments.grids.split(","):
        rows, columns = (int(part) for part in grid.split("x"))
        largest = max(_tiles(captured, x[:1], rows, columns))
        print(f"{grid}: largest tile {largest / 1e6:.1f} MB, {largest / alone:.3f} of one device")
    return 0


def _tiles(captured: Captured, x: Tensor, rows: int, columns: int) -> Iterator[int]:
    """Bytes of each tile after a forward."""
    description, part = cut_where_tiling_ends(captured.description)
    borders = range(len(part.network.units) + 1)
    layout = Layout(part.network, ((1.0,) * rows, (1.0,) * columns), borders)
    replica = Replica(description, part, captured.state())
    programs = [
        TileProgram(description, part, layout, tile, replica) for tile in range(layout.tiles)
    ]
    passes = [TilePass(program, len(x)) for program in programs]
    kept: list[Kept] = [{} for _ in passes]
    waiting: deque[Message] = deque()

    def run(tile: int, work: Callable[[], list[Message]]) -> None:
        with counting(kept[tile]):
            waiting.extend(work())

    (image,) = part.network.entering
    for tile, tile_pass in enumerate(passes):
        region = layout.input_region(tile, image)
        cut = x[:, :, region.rows.first : region.rows.end, region.columns.first :]
        cut = cut[..., : region.columns.size].contiguous()
        run(tile, lambda p=tile_pass, c=cut: p.begin_forward({image: c}))
    while waiting:
        message = waiting.popleft()
        own = passes[message.receiver]
        run(message.receiver, lambda p=own, m=message: p.receive(m))
    filters = set(addresses(replica.tensors.values()))
    for tile_pass, found in zip(passes, kept, strict=True):
        for tensor in tile_pass.kept:
            keep(found, tensor)
        yield kept_bytes(found, filters)


@contextmanager
def counting(kept: Kept) -> Iterator[None]:
    """Collect the storages that autograd keeps."""

    def saved(tensor: Tensor) -> Tensor:
        keep(kept, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        yield


def keep(kept: Kept, tensor: Tensor) -> None:
    """Count its memory, once for all that share it."""
    storage = tensor.untyped_storage()
    kept[storage.data_ptr()] = storage.nbytes()


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Of their memory."""
    return [tensor.untyped_storage().data_ptr() for tensor in tensors]


def kept_bytes(kept: Kept, without: set[int]) -> int:
    """Together; `without`: addresses that do not count."""
    return sum(size for address, size in kept.items() if address not in without)


if __name__ == "__main__":
    sys.exit(main())
