"""Frames that a line cannot take end the line, and say why; those of others are dropped."""

from __future__ import annotations

import pytest
import torch

from p2ptrain.errors import ProtocolError
from p2ptrain.job.rounds import RoundMode
from p2ptrain.messages.kinds import VALUES
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.messages.tensors import MicroBatchKey, MicroBatchSlice, SampleRange, StreamId
from p2ptrain.runtime.io.tensor_receiver import StreamContents, TensorReceiver
from p2ptrain.runtime.io.tensor_router import ACTIVATIONS, TensorRouter
from tests.support.memory_household import MemoryHousehold

LINE = StreamId(GenerationKey("job", 1), 0, ACTIVATIONS)
SAMPLES = 2


def piece(number: int = 0) -> MicroBatchSlice:
    return MicroBatchSlice.whole(MicroBatchKey(0, number), RoundMode.TRAIN, SAMPLES)


def receiver(sender: str) -> TensorReceiver:
    """Takes one value of a whole number a sample."""
    contents = StreamContents(
        "activations of stage 0",
        lambda _mode, size: [(torch.int64, (size,))],
        lambda _mode: [0],
    )
    sources = (SampleRange(sender, 0, SAMPLES),)
    return TensorReceiver(contents, lambda _number, _size: sources, capacity=2, largest=SAMPLES)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([torch.arange(SAMPLES)] * 2, "2 values instead of 1"),
        ([torch.zeros(SAMPLES)], "float32"),
        ([], "0 values instead of 1"),
    ],
)
async def test_what_a_line_does_not_carry_is_reported_to_the_one_that_waits_for_it(
    values: list[torch.Tensor], why: str
) -> None:
    async with MemoryHousehold(["a", "b"]) as mesh:
        a, b = mesh["a"].self_id, mesh["b"].self_id
        there, here = TensorRouter(mesh["a"]), TensorRouter(mesh["b"])
        target = receiver(a)
        here.connect_tensors(LINE, target, [a])
        await there.send_values(b, LINE, piece(), values)
        with pytest.raises(ProtocolError, match=rf"what a sent is refused \(.*{why}.*\): does a"):
            await target.take(piece().key)
        await there.send_values(b, LINE, piece(1), [torch.arange(SAMPLES)])  # the link is there
        assert here.stale_frames == 1 + bool(values), "nothing of that line is taken any more"


async def test_no_memory_is_taken_for_what_nobody_wants_any_more() -> None:
    """Any member may send it, of a generation that never was; it says itself how large it is."""
    async with MemoryHousehold(["a", "b"]) as mesh:
        a, b = mesh["a"].self_id, mesh["b"].self_id
        there, here = TensorRouter(mesh["a"]), TensorRouter(mesh["b"])
        assert mesh["b"].router.open_parts(a, VALUES, LINE.fields(), [1 << 40]) is None
        await there.send_values(b, LINE, piece(), [torch.arange(SAMPLES)])
        assert here.stale_frames == 1
        here.connect_tensors(LINE, receiver(a), [a])
        here.disconnect(LINE.key)
        assert mesh["b"].router.open_parts(a, VALUES, LINE.fields(), [1 << 40]) is None


async def test_what_comes_on_a_line_of_another_device_is_dropped() -> None:
    """Without any memory for it; what the line's own device sends is taken as before."""
    async with MemoryHousehold(["a", "b", "c"]) as mesh:
        a, b, c = (mesh[name].self_id for name in "abc")
        there, eve, here = (TensorRouter(mesh[name]) for name in "acb")
        taken = receiver(a)
        here.connect_tensors(LINE, taken, [a])
        await eve.send_values(b, LINE, piece(), [torch.zeros(SAMPLES, dtype=torch.int64)])
        assert mesh["b"].router.open_parts(c, VALUES, LINE.fields(), [1 << 40]) is None
        await there.send_values(b, LINE, piece(), [torch.arange(SAMPLES)])
        (values,) = (await taken.take(piece().key, SAMPLES)).slices
        assert torch.equal(values[0], torch.arange(SAMPLES))
