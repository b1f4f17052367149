from __future__ import annotations

import asyncio

import pytest

from p2ptrain.errors import LinkClosed
from p2ptrain.net.encoder import OutgoingMessage
from p2ptrain.net.frame import CHUNK_BYTES, Codec, encode_block
from p2ptrain.net.link.send_queue import Outbox, SendQueue
from p2ptrain.net.message import Message, PartKind, Priority

BUDGET_BYTES = 1_000_000
CONTROL, TENSOR, BULK = Priority.CONTROL, Priority.TENSOR, Priority.BULK


def outbox(codec: Codec = Codec.RAW) -> Outbox:
    return Outbox(dict.fromkeys(Priority, BUDGET_BYTES), lambda kind, part: codec)


def outgoing(size: int, lane: Priority = BULK, kind: str = "test") -> OutgoingMessage:
    parts = (memoryview(bytes(size)),) if size else ()
    return OutgoingMessage(Message(kind, {}, parts, (PartKind.WEIGHT,) * len(parts)), lane)


def lanes_in_order(box: Outbox) -> list[str]:
    """Takes every frame."""
    taken = []
    while frame := box.next_frame():
        taken.append(frame.lane.name)
    return taken


def test_the_most_urgent_lane_goes_first_even_inside_a_message() -> None:
    box = outbox()
    box.put(outgoing(2 * CHUNK_BYTES))
    first = box.next_frame()
    assert first is not None
    box.put(outgoing(0, CONTROL))
    box.put(outgoing(CHUNK_BYTES // 2, TENSOR))
    assert [first.lane.name, *lanes_in_order(box)] == ["BULK", "CONTROL", "TENSOR", "BULK", "BULK"]
    assert not box


def test_copies_wait_for_everything_else_that_is_on_its_way() -> None:
    box = outbox()
    box.put(outgoing(2 * CHUNK_BYTES, Priority.REPLICA))
    begun = box.next_frame()
    assert begun is not None
    for lane in (BULK, Priority.COLLECTIVE, TENSOR, CONTROL):
        box.put(outgoing(CHUNK_BYTES // 2, lane))
    order = ["CONTROL", "TENSOR", "COLLECTIVE", "BULK", "REPLICA", "REPLICA"]
    assert lanes_in_order(box) == order


def test_a_lane_keeps_its_order() -> None:
    box = outbox()
    kinds = ["first", "second", "third"]
    for kind in kinds:
        box.put(outgoing(10, BULK, kind))
    frames = [box.next_frame() for _ in kinds]
    for kind, frame in zip(kinds, frames, strict=True):
        assert frame is not None
        assert kind.encode() in b"".join(frame.buffers)


def test_queued_bytes_fall_with_every_frame() -> None:
    box = outbox()
    item = outgoing(300_000)
    total = item.unsent_bytes
    box.put(item)
    assert box.queued_bytes(BULK) == total
    left = [total]
    while box.next_frame():
        left.append(box.queued_bytes(BULK))
    assert left == sorted(left, reverse=True)
    assert left[1] == total - CHUNK_BYTES - (total - 300_000) + 1  # one byte was the codec
    assert left[-1] == 0


def test_queued_bytes_fall_with_compressed_frames_too() -> None:
    box = outbox(Codec.LZ4)
    box.put(outgoing(900_000))
    while box:
        for item, job in box.compression_jobs():
            item.compressed([encode_block(block, job.codec) for block in job.blocks])
        box.next_frame()
    assert box.queued_bytes(BULK) == 0


def test_a_lane_waiting_for_compression_lets_others_pass() -> None:
    box = outbox(Codec.LZ4)
    box.put(outgoing(300_000, TENSOR))
    assert box.next_frame() is not None  # header and codecs
    (job,) = box.compression_jobs()
    assert box.compression_jobs() == []  # one job a message
    box.put(outgoing(0, BULK))
    assert lanes_in_order(box) == ["BULK"]
    job[0].compressed([encode_block(block) for block in job[1].blocks])
    assert lanes_in_order(box)[0] == "TENSOR"


def test_an_empty_lane_admits_any_one_message() -> None:
    box = outbox()
    assert box.has_room(outgoing(5 * BUDGET_BYTES))
    box.put(outgoing(5 * BUDGET_BYTES))
    assert not box.has_room(outgoing(0))
    assert box.has_room(outgoing(0, CONTROL))


async def test_senders_wait_in_order_for_room() -> None:
    box = outbox()
    queue = SendQueue(box)
    await queue.put(outgoing(BUDGET_BYTES - 1000))
    order: list[str] = []

    async def send(kind: str, size: int) -> None:
        await queue.put(outgoing(size, BULK, kind))
        order.append(kind)

    async with asyncio.TaskGroup() as group:
        for kind, size in (("big", 500_000), ("small", 10), ("medium", 400_000)):
            group.create_task(send(kind, size))
        await asyncio.sleep(0)
        assert order == []  # the small one may not overtake
        while box.next_frame():
            queue.admit(BULK)
            await asyncio.sleep(0)
            assert box.queued_bytes(BULK) <= BUDGET_BYTES
    assert order == ["big", "small", "medium"]


async def test_a_cancelled_sender_leaves_the_queue() -> None:
    box = outbox()
    queue = SendQueue(box)
    await queue.put(outgoing(BUDGET_BYTES))
    impatient = asyncio.create_task(queue.put(outgoing(BUDGET_BYTES, BULK, "impatient")))
    patient = asyncio.create_task(queue.put(outgoing(0, BULK, "patient")))
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.gather(impatient, return_exceptions=True)
    while box.next_frame():
        queue.admit(BULK)
    await patient
    assert impatient.cancelled()


async def test_waiting_senders_learn_of_the_end() -> None:
    box = outbox()
    queue = SendQueue(box)
    await queue.put(outgoing(BUDGET_BYTES))
    waiting = [asyncio.create_task(queue.put(outgoing(10, BULK))) for _ in range(3)]
    await asyncio.sleep(0)
    queue.fail(LinkClosed("gone"))
    for task in waiting:
        with pytest.raises(LinkClosed, match="gone"):
            await task
