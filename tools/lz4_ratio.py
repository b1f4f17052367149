"""Does LZ4 shrink what crosses a cut, and does sorting bytes by significance before it help?

    python tools/lz4_ratio.py [--models mobilenetv2 resnet50 ...] [--cuts 4] [--json FILE]

Activations and gradients at evenly spaced cuts of the benchmark's models, after a few updates, in
blocks as the wire has them. Ways to compress a block of float32:

    lz4       as it is
    shuffle4  first all lowest bytes, then all second ones ... (what Blosc calls shuffle), then LZ4
    shuffle2  the same in units of two bytes
    exponent  only the highest bytes (sign and exponent) by LZ4, the others as they are

`ratio` is bytes after by bytes before, `MB/s` of bytes before in one thread, shuffling included.
`gain` is what a whole core's processor gets out of it at 100 Mbit/s, as `net/compression.py`
counts: below its `gain_to_start` nothing is compressed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import lz4.block  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from p2ptrain.model.capture import capture  # noqa: E402
from p2ptrain.model.stage import Stage  # noqa: E402
from p2ptrain.model.wire import pack  # noqa: E402
from p2ptrain.net.blocks import BLOCK_BYTES  # noqa: E402
from tools.bench import models  # noqa: E402

NAMES = ("mobilenetv2", "resnet50", "bert_small", "vit")
BATCH = 8
UPDATES = 3
LINK_BYTES_PER_S = 12.5e6
TIMED_SECONDS = 0.05


def _shuffled(raw: memoryview, size: int) -> np.ndarray:
    """Bytes grouped by their place in elements of `size` bytes."""
    return np.ascontiguousarray(np.frombuffer(raw, np.uint8).reshape(-1, size).T)


def _lz4(raw: memoryview) -> bytes:
    return bytes(lz4.block.compress(raw, store_size=False))


def _lz4_back(packed: bytes, count: int) -> bytes:
    return bytes(lz4.block.decompress(packed, uncompressed_size=count))


def _shuffle(size: int) -> tuple[Callable[[memoryview], list[bytes]], Callable[..., object]]:
    def back(packed: list[bytes], raw: memoryview) -> object:
        planes = np.frombuffer(_lz4_back(packed[0], raw.nbytes), np.uint8).reshape(size, -1)
        return np.ascontiguousarray(planes.T)

    return (lambda raw: [_lz4(memoryview(_shuffled(raw, size)).cast("B"))]), back


def _exponent_packed(raw: memoryview) -> list[bytes]:
    planes = np.frombuffer(raw, np.uint8).reshape(-1, 4)
    high = np.ascontiguousarray(planes[:, 3])
    return [_lz4(memoryview(high)), np.ascontiguousarray(planes[:, :3]).tobytes()]


def _exponent_back(packed: list[bytes], raw: memoryview) -> object:
    whole = np.empty((raw.nbytes // 4, 4), np.uint8)
    whole[:, 3] = np.frombuffer(_lz4_back(packed[0], raw.nbytes // 4), np.uint8)
    whole[:, :3] = np.frombuffer(packed[1], np.uint8).reshape(-1, 3)
    return whole


WAYS: dict[str, tuple[Callable[[memoryview], list[bytes]], Callable[..., object]]] = {
    "lz4": (lambda raw: [_lz4(raw)], lambda packed, raw: _lz4_back(packed[0], raw.nbytes)),
    "shuffle4": _shuffle(4),
    "shuffle2": _shuffle(2),
    "exponent": (_exponent_packed, _exponent_back),
}


@dataclass(frozen=True, slots=True)
class Found:
    """One way on one model's activations or gradients; see the module."""

    model: str
    kind: str
    way: str
    ratio: float
    pack_bytes_per_s: float
    unpack_bytes_per_s: float

    @property
    def gain(self) -> float:
        """Seconds of a raw byte by seconds of a compressed one."""
        link = LINK_BYTES_PER_S
        seconds = 1 / self.pack_bytes_per_s + self.ratio / link + 1 / self.unpack_bytes_per_s
        return 1 / link / seconds


def crossing(name: str, cuts: int) -> Iterator[tuple[str, Tensor]]:
    """("activations" or "gradients", a tensor) of all cuts."""
    training = models.load(name)
    model, data = training.build(), training.data(BATCH)
    inputs, targets = (torch.stack(column) for column in zip(*data, strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(UPDATES):
        training.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    captured = capture(model, training.loss, (inputs, targets))
    state, units = captured.state(), len(captured.description.units)
    for index in range(1, cuts + 1):
        cut = max(1, units * index // (cuts + 1))
        first = Stage(captured.description, 0, cut, state)
        last = Stage(captured.description, cut, units, state)
        values = first.forward(0, [inputs], [targets], weight=1.0)
        last.forward(0, [v.detach().requires_grad_(v.requires_grad) for v in values], [targets])
        yield from (("activations", value) for value in values if value.is_floating_point())
        gradients = last.backward(0)
        yield from (("gradients", value) for value in gradients if value is not None)


def blocks_of(tensors: Sequence[Tensor]) -> list[memoryview]:
    """Whole blocks, as the wire has them."""
    parts = [pack(tensor).part for tensor in tensors]
    starts = [(part, at) for part in parts for at in range(0, part.nbytes, BLOCK_BYTES)]
    return [part[at : at + BLOCK_BYTES] for part, at in starts]


def measured(blocks: Sequence[memoryview], way: str) -> tuple[float, float, float]:
    """Ratio, bytes/s packed, bytes/s unpacked; each block counts by its size."""
    there, back = WAYS[way]
    packed = [there(block) for block in blocks]
    total = sum(block.nbytes for block in blocks)
    # What does not shrink is sent as it is, for all ways alike.
    after = sum(min(sum(map(len, p)), b.nbytes) for p, b in zip(packed, blocks, strict=True))
    pairs = list(zip(packed, blocks, strict=True))
    pack_seconds = _seconds(lambda: [there(block) for block in blocks])
    unpack_seconds = _seconds(lambda: [back(p, block) for p, block in pairs])
    return after / total, total / pack_seconds, total / unpack_seconds


def _seconds(work: Callable[[], object]) -> float:
    """The shortest of several runs."""
    least, until = float("inf"), time.perf_counter() + TIMED_SECONDS
    while time.perf_counter() < until or least == float("inf"):
        begin = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - begin)
    return least


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--cuts", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: list[Found] = []
    print(f"{'model':14}{'kind':13}{'way':10}{'ratio':>7}{'pack':>8}{'unpack':>8}  MB/s{'gain':>7}")
    for name in arguments.models:
        tensors: dict[str, list[Tensor]] = {}
        for kind, tensor in crossing(name, arguments.cuts):
            tensors.setdefault(kind, []).append(tensor)
        for kind, of_kind in tensors.items():
            blocks = blocks_of(of_kind)
            for way in WAYS:
                found = Found(name, kind, way, *measured(blocks, way))
                results.append(found)
                speeds = f"{found.pack_bytes_per_s / 1e6:8.0f}{found.unpack_bytes_per_s / 1e6:8.0f}"
                row = f"{name:14}{kind:13}{way:10}{found.ratio:7.3f}{speeds}{found.gain:13.2f}"
                print(row, flush=True)
    if arguments.json:
        rows = [{**asdict(found), "gain": found.gain} for found in results]
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
