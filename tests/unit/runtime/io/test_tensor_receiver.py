"""What comes in is only what the plan says, from whom it says; parts are put together again."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import Tensor

from p2ptrain.errors import ProtocolError
from p2ptrain.job.rounds import RoundMode
from p2ptrain.messages.tensors import MicroBatchKey, MicroBatchSlice, SampleRange, to_messages
from p2ptrain.net.message import Message, PartKind
from p2ptrain.runtime.io.tensor_receiver import GatheredValues, StreamContents, TensorReceiver

KEY = MicroBatchKey(0, 0)
SOURCES = (SampleRange("a", 0, 3), SampleRange("b", 3, 4))


def receiver(*, optional: bool = False) -> TensorReceiver:
    """Pieces of 4 samples, a row of two float32 each, and one value that all samples share."""
    contents = StreamContents(
        "activations",
        lambda _mode, size: [(torch.float32, (size, 2)), (torch.float32, (2,))],
        lambda _mode: [0, None],
        optional=optional,
    )
    return TensorReceiver(contents, lambda _number, _size: SOURCES, capacity=2, largest=4)


def piece(first: int, end: int) -> MicroBatchSlice:
    """Those samples of the one micro-batch."""
    return MicroBatchSlice(KEY, RoundMode.TRAIN, 4, first, end)


def receive(target: TensorReceiver, peer: str, message: Message) -> None:
    """As the mesh does: header, then body."""
    sizes = [part.nbytes for part in message.parts]
    for buffer, part in zip(target.open(peer, message.fields, sizes), message.parts, strict=True):
        buffer[:] = part
    target.deliver(peer, message.fields)


def message(what: MicroBatchSlice, *values: Tensor | None) -> Message:
    """The one message of a short piece."""
    (only,) = to_messages("train.values", {}, what, values, PartKind.ACTIVATION)
    return only


async def test_parts_of_two_devices_become_one_piece_whatever_their_order() -> None:
    target, rows = receiver(), torch.arange(8.0).reshape(4, 2)
    common = torch.tensor([7.0, 8.0])
    receive(target, "b", message(piece(3, 4), rows[3:], common))
    receive(target, "a", message(piece(0, 3), rows[:3], common))
    joined = (await target.take(KEY)).join()
    assert torch.equal(joined[0], rows)  # type: ignore[arg-type]
    assert torch.equal(joined[1], common)  # type: ignore[arg-type]


async def test_gradients_of_what_all_samples_share_are_summed_and_may_be_missing() -> None:
    target, rows = receiver(optional=True), torch.ones(4, 2)
    receive(target, "a", message(piece(0, 3), rows[:3], torch.ones(2)))
    receive(target, "b", message(piece(3, 4), rows[3:], torch.ones(2)))
    joined = (await target.take(KEY)).join()
    assert torch.equal(joined[1], torch.full((2,), 2.0))  # type: ignore[arg-type]
    target = receiver(optional=True)
    receive(target, "a", message(piece(0, 3), None, None))
    receive(target, "b", message(piece(3, 4), None, None))
    assert (await target.take(KEY)).join() == [None, None]


def test_a_gradient_that_was_there_may_not_be_missing_later() -> None:
    target, rows = receiver(optional=True), torch.ones(3, 2)
    receive(target, "a", message(piece(0, 3), rows, None))
    later = message(MicroBatchSlice(MicroBatchKey(0, 1), RoundMode.TRAIN, 4, 0, 3), None, None)
    with pytest.raises(ProtocolError, match="value 0 is missing, and was there before"):
        receive(target, "a", later)


def test_one_device_s_piece_is_not_copied() -> None:
    value = torch.ones(3)
    assert GatheredValues([[value]], [0], summed=False).join()[0] is value


@pytest.mark.parametrize(
    ("peer", "first", "end"), [("a", 0, 4), ("a", 3, 4), ("b", 0, 3), ("stranger", 0, 3)]
)
def test_samples_that_are_not_due_from_that_device_are_refused(
    peer: str, first: int, end: int
) -> None:
    rows = torch.zeros(end - first, 2)
    with pytest.raises(ProtocolError, match="not due from"):
        receive(receiver(), peer, message(piece(first, end), rows, torch.zeros(2)))


def test_a_part_that_comes_twice_is_refused() -> None:
    target, part = receiver(), message(piece(3, 4), torch.zeros(1, 2), torch.zeros(2))
    receive(target, "b", part)
    with pytest.raises(ProtocolError, match="arrived twice"):
        receive(target, "b", part)


def long_receiver() -> TensorReceiver:
    """Pieces of 30 values, which come in two messages."""
    contents = StreamContents(
        "activations", lambda _mode, size: [(torch.float32, (size,))] * 30, lambda _mode: [0] * 30
    )
    return TensorReceiver(contents, lambda _number, _size: SOURCES, capacity=2, largest=4)


def halves(value: float, mode: RoundMode = RoundMode.TRAIN) -> list[Message]:
    values = [torch.full((3,), value)] * 30
    what = MicroBatchSlice(KEY, mode, 4, 0, 3)
    return to_messages("train.values", {}, what, values, PartKind.ACTIVATION)


@pytest.mark.parametrize("number", [0, 1])
async def test_a_message_that_comes_twice_before_its_piece_is_whole_is_refused(
    number: int,
) -> None:
    target, messages = long_receiver(), halves(1.0)
    receive(target, "a", messages[number])
    for again in (halves(2.0)[number], no_values(messages[number])):
        with pytest.raises(ProtocolError, match="arrived twice"):
            receive(target, "a", again)
    receive(target, "a", messages[1 - number])
    what = MicroBatchSlice(KEY, RoundMode.TRAIN, 4, 3, 4)
    target.put("b", what, [torch.zeros(1)] * 30)
    assert all(value.tolist() == [1, 1, 1, 0] for value in (await target.take(KEY)).join())  # type: ignore[union-attr]


def no_values(message: Message) -> Message:
    """It begins where that one does."""
    return Message(message.kind, {**message.fields, "values": []})


def test_a_message_that_comes_again_while_it_is_received_is_refused() -> None:
    """Over another lane of its link: what has not come yet would count as values."""
    target, (first, _) = long_receiver(), halves(1.0)
    sizes = [part.nbytes for part in first.parts]
    target.open("a", first.fields, sizes)
    with pytest.raises(ProtocolError, match="arrived twice"):
        target.open("a", first.fields, sizes)


def test_messages_of_one_piece_agree_on_what_it_is() -> None:
    target = long_receiver()
    receive(target, "a", halves(1.0)[0])
    with pytest.raises(ProtocolError, match=r"the messages of .* differ"):
        receive(target, "a", halves(1.0, RoundMode.EVAL)[1])


def test_pieces_that_nobody_completes_are_bounded() -> None:
    target = receiver()

    def half(number: int) -> None:
        what = MicroBatchSlice(MicroBatchKey(0, number), RoundMode.TRAIN, 4, 3, 4)
        receive(target, "b", message(what, torch.zeros(1, 2), torch.zeros(2)))

    half(0)
    half(1)
    with pytest.raises(ProtocolError, match="arrived unasked"):
        half(2)


@pytest.mark.parametrize("mode", RoundMode)
async def test_only_what_comes_in_every_round_can_come_long_before_it(mode: RoundMode) -> None:
    """Outputs come in evaluations, with any number of rounds between them."""
    contents = StreamContents(
        "outputs", lambda _mode, size: [(torch.float32, (size,))], lambda _: [0]
    )
    target = TensorReceiver(
        contents, lambda _number, size: [SampleRange("a", 0, size)], capacity=2, largest=4
    )
    for index in (0, 23, 46):
        what = MicroBatchSlice(MicroBatchKey(index, 0), mode, 4, 0, 4)
        if index and mode is RoundMode.TRAIN:
            with pytest.raises(ProtocolError, match="arrived long before its round"):
                receive(target, "a", message(what, torch.ones(4)))
            continue
        receive(target, "a", message(what, torch.ones(4)))
        assert (await target.take(what.key, 4)).join()


async def test_a_reader_waits_until_the_last_part_is_here() -> None:
    target = receiver()
    receive(target, "b", message(piece(3, 4), torch.zeros(1, 2), torch.zeros(2)))
    reader = asyncio.ensure_future(target.take(KEY))
    await asyncio.sleep(0)
    assert not reader.done()
    receive(target, "a", message(piece(0, 3), torch.zeros(3, 2), torch.zeros(2)))
    assert len((await reader).slices) == 2


async def test_what_cannot_be_taken_in_is_reported_to_the_one_that_waits() -> None:
    target, rows = receiver(), torch.arange(8.0).reshape(4, 2)
    common = torch.tensor([7.0, 8.0])
    receive(target, "b", message(piece(3, 4), rows[3:], common))
    receive(target, "a", message(piece(0, 3), rows[:3], common))
    waiting = asyncio.create_task(target.take(MicroBatchKey(0, 1)))
    await asyncio.sleep(0)
    target.fail(MemoryError())
    with pytest.raises(MemoryError):
        await waiting
    assert len((await target.take(KEY)).join()) == 2, "what is here is here"
    assert target.has(KEY), "nobody waits in vain"
    with pytest.raises(MemoryError):
        await target.take(KEY)
