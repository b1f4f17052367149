"""What a link promises, checked the same for every way to carry one."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from p2ptrain.errors import LinkClosed, ProtocolError
from p2ptrain.net.frame import Header
from p2ptrain.net.link.flow_control import LinkSettings
from p2ptrain.net.message import Message, PartKind, Priority
from tests.support.links import Device, Inbox
from tests.unit.net.conftest import Connect

CONTROL, TENSOR, BULK = Priority.CONTROL, Priority.TENSOR, Priority.BULK
CONTENT = random.Random(0).randbytes(700_000)


def message(size: int = 0, kind: str = "test", **fields: int) -> Message:
    return Message(kind, fields, (memoryview(CONTENT)[:size],) if size else ())


def kinds(inbox: Inbox) -> list[str]:
    return [item.kind for item in inbox.messages]


async def test_messages_arrive_whole_both_ways(connect: Connect) -> None:
    pair = await connect()
    parts = (memoryview(CONTENT), memoryview(b""), memoryview(b"x" * 70_000))
    sent = Message("a.b", {"n": [1, None, 2.5]}, parts, (PartKind.GRADIENT,) * 3)
    await pair.left.send(sent, TENSOR)
    await pair.right.send(message(kind="answer"))
    (got,) = await pair.right_inbox.count(1)
    assert (got.kind, got.fields, got.part_kinds) == ("a.b", sent.fields, sent.part_kinds)
    assert [bytes(part) for part in got.parts] == [bytes(part) for part in parts]
    await pair.left_inbox.count(1)
    assert kinds(pair.left_inbox) == ["answer"]


async def test_each_end_knows_the_other(
    connect: Connect, left_device: Device, right_device: Device
) -> None:
    pair = await connect()
    assert (pair.left.peer_id, pair.right.peer_id) == (right_device.id, left_device.id)
    assert pair.left.is_open
    assert not pair.left.closed.done()


async def test_a_lane_keeps_its_order(connect: Connect) -> None:
    pair = await connect()
    sizes = [0, 10, 200_000, 0, 300_000, 1]
    for number, size in enumerate(sizes):
        for lane in (BULK, TENSOR):
            await pair.left.send(message(size, lane.name, n=number), lane)
    got = await pair.right_inbox.count(2 * len(sizes))
    for lane in (BULK, TENSOR):
        numbers = [item.fields["n"] for item in got if item.kind == lane.name]
        assert numbers == list(range(len(sizes)))


async def test_a_heartbeat_overtakes_bulk(connect: Connect) -> None:
    pair = await connect()
    for _ in range(8):
        await pair.left.send(message(700_000, "bulk"), BULK)
    await pair.left.send(message(kind="beat"), CONTROL)
    await pair.right_inbox.count(9)
    # What the stream had taken already goes first: some 500 KB at most, of 5.6 MB.
    assert kinds(pair.right_inbox).index("beat") <= 2


async def test_a_slow_reader_bounds_the_sender(connect: Connect) -> None:
    pair = await connect(LinkSettings(budget_bytes=1_000_000))
    pair.right.pause_receiving()
    sent = 0

    async def flood() -> None:
        nonlocal sent
        for _ in range(40):
            await pair.left.send(message(700_000), BULK)
            sent += 1

    task = asyncio.create_task(flood())
    for _ in range(300):
        await asyncio.sleep(0)
    assert 0 < pair.left.statistics().queued_bytes <= 1_000_000
    assert sent < 20
    await pair.left.send(message(kind="beat"), CONTROL)  # its own budget admits it at once
    pair.right.resume_receiving()
    await pair.right_inbox.count(41)
    await task
    assert sent == 40


async def test_closing_sends_what_is_queued(connect: Connect) -> None:
    pair = await connect()
    for number in range(5):
        await pair.left.send(message(300_000, n=number), BULK)
    await pair.left.send(message(kind="farewell"), BULK)
    pair.left.close("going to sleep")
    assert not pair.left.is_open
    assert isinstance(await pair.right_inbox.loss(), LinkClosed)
    assert kinds(pair.right_inbox) == ["test"] * 5 + ["farewell"]
    assert "going to sleep" in str(await pair.left_inbox.loss())


async def test_lost_is_reported_exactly_once(connect: Connect) -> None:
    pair = await connect()
    pair.left.close("a")
    pair.left.close("b")
    pair.left.abort("c")
    await pair.left.closed
    await pair.right.closed
    pair.left.abort("d")
    pair.right.close("e")
    await asyncio.sleep(0)
    assert len(pair.left_inbox.losses) == len(pair.right_inbox.losses) == 1
    assert pair.left.closed.done()


async def test_a_closed_link_refuses_to_send(connect: Connect) -> None:
    pair = await connect()
    pair.left.abort("enough")
    with pytest.raises(LinkClosed, match="enough"):
        await pair.left.send(message())
    await pair.right.closed
    with pytest.raises(LinkClosed):
        await pair.right.send(message())


@pytest.mark.parametrize("who", ["left", "right"])
async def test_the_end_reaches_those_who_wait_to_send(connect: Connect, who: str) -> None:
    pair = await connect(LinkSettings(budget_bytes=100_000))
    pair.right.pause_receiving()
    outcomes: list[LinkClosed] = []

    async def flood() -> None:
        while True:
            await pair.left.send(message(90_000), BULK)

    async def keep() -> None:
        try:
            await flood()
        except LinkClosed as error:
            outcomes.append(error)

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(keep())
        for _ in range(50):
            await asyncio.sleep(0)
        (pair.left if who == "left" else pair.right).abort("cable pulled")
    assert len(outcomes) == 3


async def test_an_abort_in_the_middle_of_messages_leaves_nothing(connect: Connect) -> None:
    pair = await connect()
    with contextlib.suppress(LinkClosed):
        for number in range(6):
            await pair.left.send(message(700_000, n=number), BULK)
            if number == 2:
                pair.right.abort()
    await pair.left.closed
    assert pair.left.statistics().queued_bytes == 0


async def test_a_refused_message_closes_the_link(connect: Connect) -> None:
    pair = await connect()

    def refuse(header: Header) -> list[memoryview]:
        raise ProtocolError(f"{header.kind} is not expected")

    pair.right_inbox.open_parts_with = refuse
    await pair.left.send(message(1000, "weights"), BULK)
    error = await pair.right_inbox.loss()
    assert isinstance(error, ProtocolError)
    assert isinstance(await pair.left_inbox.loss(), LinkClosed)
    assert pair.right_inbox.messages == []


async def test_messages_without_parts_open_none(connect: Connect) -> None:
    pair = await connect()
    await pair.left.send(message())
    await pair.right_inbox.count(1)
    assert pair.right_inbox.opened == []


async def test_parts_land_in_the_memory_given(connect: Connect) -> None:
    pair = await connect()
    place = memoryview(bytearray(700_000))
    pair.right_inbox.open_parts_with = lambda header: [place]
    await pair.left.send(message(700_000), TENSOR)
    (got,) = await pair.right_inbox.count(1)
    assert got.parts[0] is place
    assert place == CONTENT


async def test_counters(connect: Connect) -> None:
    pair = await connect()
    await pair.left.send(message(500_000), BULK)
    await pair.left.send(message())
    await pair.right_inbox.count(2)
    sent, received = pair.left.statistics(), pair.right.statistics()
    assert (sent.sent_messages, received.received_messages) == (2, 2)
    assert sent.sent_parts_bytes == 500_000
    assert sent.sent_bytes == received.received_bytes
    assert 500_000 < sent.sent_bytes < 501_000
    assert sent.queued_bytes == sent.received_bytes == 0


async def test_a_peer_can_answer_from_deliver(connect: Connect) -> None:
    pair = await connect()
    for _ in range(20):
        await pair.left.send(message(kind="ping"))
        await pair.right_inbox.count(1)
        pair.right_inbox.messages.clear()
        await pair.right.send(message(kind="pong"))
        await pair.left_inbox.count(1)
        pair.left_inbox.messages.clear()
