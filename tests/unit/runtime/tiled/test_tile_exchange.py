"""Two devices of a tiled stage over a memory mesh: what may come, and what may not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2ptrain.errors import ProtocolError
from p2ptrain.job.rounds import RoundMode
from p2ptrain.messages.assignment import StageAssignment
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.messages.tensors import MicroBatchKey, MicroBatchSlice, StreamId
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.plan.types.allocation import Allocation, TileShape
from p2ptrain.runtime.io.tensor_router import TensorRouter
from p2ptrain.runtime.tiled.tile_layout import StageTileLayout
from p2ptrain.runtime.tiled.tiled_executor import FLOW, TileExchange
from p2ptrain.runtime.tiled.tiled_stage import TiledStage
from p2ptrain.tiling.kernels.tile_steps import Halo, TileMessage
from tests.support.memory_household import MemoryHousehold

LINE = StreamId(GenerationKey("job", 1), 0, FLOW)
SAMPLES = 2
SHAPE = TileShape((1.0,), (0.5, 0.5), (0, 1, 2))
EARLY = TileShape((1.0,), (0.5, 0.5), (0, 1, 2), early=(1,))


class Net(nn.Module):
    """Two convolutions, the first of them normalised, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 2, 3, padding=1), nn.ReLU())
        self.third = nn.Conv2d(2, 2, 3)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Image to classes."""
        x = self.third(self.second(self.first(x)))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    return capture(Net(), cross_entropy, (torch.randn(2, 3, 6, 8), torch.tensor([0, 1])))


def test_tiles_get_the_images_whatever_stands_before_them() -> None:
    class Weighed(Net):
        def forward(self, unused: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    images = torch.randn(SAMPLES, 3, 6, 8)
    inputs = torch.zeros(SAMPLES, 2), images
    model = capture(Weighed(), cross_entropy, (inputs, torch.tensor([0, 1])))
    place = StageAssignment(0, 2, 1, ("a", "b"), (1, 1), Allocation.TILES, tiling=SHAPE)
    tiles = StageTileLayout(model.description, place)
    for mode in RoundMode:
        (part,) = tiles.entering_parts("a", mode, model.entering(inputs, mode.value))
        assert torch.equal(part, images[..., : part.shape[-1]])


@dataclass
class Device:
    """One of the two."""

    id: str
    stage: TiledStage
    exchange: TileExchange
    board: TensorRouter


@asynccontextmanager
async def pair(captured: Captured, shape: TileShape = SHAPE) -> AsyncIterator[list[Device]]:
    async with MemoryHousehold(["a", "b"]) as mesh:
        ids = tuple(mesh[name].self_id for name in "ab")
        place = StageAssignment(0, 2, 1, ids, (1, 1), Allocation.TILES, tiling=shape)
        made = []
        for name, own in zip("ab", ids, strict=True):
            board = TensorRouter(mesh[name])
            state = {n: t.clone() for n, t in captured.state().items()}
            stage = TiledStage(captured.description, place, state, own)
            exchange = TileExchange(stage, LINE, own, board, ahead=2, largest=SAMPLES)
            made.append(Device(own, stage, exchange, board))
        yield made


def piece(number: int = 0, *, size: int = SAMPLES, index: int = 0) -> MicroBatchSlice:
    return MicroBatchSlice.whole(MicroBatchKey(index, number), RoundMode.TRAIN, size)


def halo(*, samples: int = SAMPLES) -> TileMessage:
    """What tile 1 owes tile 0 before the second convolution: one column of 4 channels."""
    return TileMessage(1, 0, Halo(1, 3), torch.arange(samples * 24.0).view(samples, 4, 6, 1))


@pytest.mark.parametrize("shape", [SHAPE, EARLY])
async def test_a_whole_pass_between_two_devices(captured: Captured, shape: TileShape) -> None:
    """Forward and back; joined, the outputs are the ordinary stage's."""
    images = torch.randn(SAMPLES, 3, 6, 8)
    plain = Net().train()
    plain.load_state_dict(captured.state())
    expected = plain.second(plain.first(images))
    expected.sum().backward()  # type: ignore[no-untyped-call]

    async def run(device: Device) -> Sequence[Tensor]:
        stage, tiles = device.stage, device.stage.tiles
        inputs = tiles.entering_parts(device.id, RoundMode.TRAIN, [images])
        sent = stage.begin_forward(0, RoundMode.TRAIN, inputs, SAMPLES)
        await carry(device, sent)
        outputs = stage.outputs(0, RoundMode.TRAIN)
        await carry(device, stage.begin_backward(0, [torch.ones_like(one) for one in outputs]))
        device.exchange.finished(piece())
        return outputs

    async def carry(device: Device, sent: list[TileMessage]) -> None:
        while True:
            await device.exchange.send(piece(), sent)
            awaited = device.stage.passing(0, RoundMode.TRAIN).awaits
            if not awaited:
                return
            arrived = await device.exchange.take(piece(), awaited)
            sent = device.stage.passing(0, RoundMode.TRAIN).receive(arrived)

    async with pair(captured, shape) as devices:
        parts = await asyncio.gather(*(run(device) for device in devices))
        tiles = devices[0].stage.tiles
        ids = [device.id for device in devices]
        (joined,) = tiles.joined(RoundMode.TRAIN, dict(zip(ids, parts, strict=True)))
        assert joined is not None
        assert torch.allclose(joined, expected, atol=1e-6)
        for name, parameter in plain.named_parameters():
            given = [device.stage.parameters().get(name) for device in devices]
            if parameter.grad is not None:
                sums = [one.grad for one in given if one is not None and one.grad is not None]
                assert torch.allclose(sums[0] + sums[1], parameter.grad, atol=1e-5), name


async def test_what_comes_early_waits(captured: Captured) -> None:
    async with pair(captured) as (a, b):
        await b.exchange.send(piece(), [halo()])
        awaited = frozenset({(0, Halo(1, 3), 1)})
        (arrived,) = await asyncio.wait_for(a.exchange.take(piece(), [awaited]), 10)
        assert torch.equal(arrived.tensor, halo().tensor)
        assert (arrived.sender, arrived.receiver, arrived.subject) == (1, 0, Halo(1, 3))


def frame(
    entries: Sequence[Any], what: MicroBatchSlice, *, size: int = SAMPLES * 24 * 4
) -> tuple[Mapping[str, Any], list[int]]:
    return {**LINE.fields(), **what.fields(), "tiles": list(entries)}, [size] * len(entries)


GOOD = ["h", 1, 3, 1, 0]


@pytest.mark.parametrize(
    ("entries", "what", "size", "told"),
    [
        ([GOOD], piece(size=3), 288, "tiles take whole micro-batches of the job's size"),
        ([GOOD], piece(), 190, "of \\[190\\] bytes do not fit"),
        ([["h", 0, 3, 1, 0]], piece(), 192, "tile 0 expects no Halo\\(group=0"),
        ([["h", 1, 3, 1, 1]], piece(), 192, "tile 1 expects no"),
        ([["h", 1, 3, 0, 1]], piece(), 192, "tile 0 is not due from its sender"),
        ([["h", 1, 3, -1, 0]], piece(), 192, "tile -1 is not due from its sender"),
        ([GOOD, GOOD], piece(), 192, "tile 1 came twice"),
        ([["m", 1, 0]], piece(), 64, "tile 0 is not due from its sender"),
        ([["m", 0, 1]], piece(), 64, "tile 0 expects no Moments"),
        ([["m", 1, 1]] * 2, piece(), 64, "tile 1 came twice"),
        ([["x", 1, 3, 1, 0]], piece(), 192, "tiles tell halos, moments and sums"),
        ([["h", 1, 3, 1]], piece(), 192, "tiles tell halos, moments and sums"),
        ([], piece(), 192, "a frame of tiles lists what it carries"),
        ([GOOD] * 49, piece(), 192, "a frame of tiles lists what it carries"),
    ],
)
async def test_anything_else_is_refused_before_memory_is_taken(
    captured: Captured, entries: Sequence[Any], what: MicroBatchSlice, size: int, told: str
) -> None:
    async with pair(captured) as (a, b):
        fields, sizes = frame(entries, what, size=size)
        with pytest.raises(ProtocolError, match=told):
            a.exchange.open(b.id, fields, sizes)


async def test_nobody_is_far_ahead_or_comes_late(captured: Captured) -> None:
    async with pair(captured) as (a, b):
        for number in range(2):
            a.exchange.open(b.id, *frame([GOOD], piece(number)))
        with pytest.raises(ProtocolError, match="over or far ahead"):
            a.exchange.open(b.id, *frame([GOOD], piece(2)))
        for number in range(2):
            a.exchange.finished(piece(number))
        a.exchange.round_over(0)
        with pytest.raises(ProtocolError, match="over or far ahead"):
            a.exchange.open(b.id, *frame([GOOD], piece(0)))
        a.exchange.open(b.id, *frame([GOOD], piece(index=1)))


async def test_a_frame_that_was_never_opened_is_refused(captured: Captured) -> None:
    async with pair(captured) as (a, b):
        fields, _sizes = frame([GOOD], piece())
        with pytest.raises(ProtocolError, match="never opened"):
            a.exchange.deliver(b.id, fields)


async def test_many_messages_are_several_frames(captured: Captured) -> None:
    """Sixty halos would not fit one frame's header."""
    async with pair(captured) as (_, b):
        sent: list[int] = []

        async def note(device: str, stream: StreamId, fields: Any, parts: Any, **how: Any) -> None:
            sent.append(len(parts))

        b.board.send_frame = note  # type: ignore[method-assign]
        await b.exchange.send(piece(), [halo()] * 60)
        assert sent == [48, 12]
