from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from p2ptrain.errors import InternalError, LinkClosed, ProtocolError
from p2ptrain.net.transport.pairing_channel import MESSAGE_LIMIT_BYTES, QUEUE_LIMIT, PairingChannel


class Line:
    """A stream that keeps what is written and notes what it is asked."""

    def __init__(self, user: PairingChannel) -> None:
        self.user = user
        self.written = b""
        self.calls: list[str] = []
        user.opened(self)

    def write(self, buffers: Sequence[bytes | memoryview]) -> None:
        self.written += b"".join(buffers)

    def limit_unsent(self, count: int) -> None:
        self.calls.append("limit_unsent")

    def expect(self, count: int) -> None:
        self.calls.append("expect")

    def hurry(self) -> None:
        self.calls.append("hurry")

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")

    def feed(self, data: bytes, most: int = 10**9) -> None:
        while data:
            buffer = self.user.get_buffer()
            count = min(len(buffer), len(data), most)
            buffer[:count] = data[:count]
            data = data[count:]
            self.user.received(count)


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(2) + content


@pytest.mark.parametrize("most", [1, 3, 10**9])
async def test_messages_are_cut_wherever_reads_end(most: int) -> None:
    channel = PairingChannel("host")
    line = Line(channel)
    contents = [b"", b"abc", bytes(MESSAGE_LIMIT_BYTES), b"z"]
    line.feed(b"".join(map(framed, contents)), most)
    assert [await channel.receive() for _ in contents] == contents


async def test_nothing_is_written_before_the_user_writes() -> None:
    channel = PairingChannel("host")
    line = Line(channel)
    assert line.written == b""
    await channel.send(b"hi")
    assert line.written == framed(b"hi")


async def test_a_length_lie_ends_the_channel() -> None:
    channel = PairingChannel("host")
    line = Line(channel)
    line.feed(framed(b"fine") + (MESSAGE_LIMIT_BYTES + 1).to_bytes(2))
    assert await channel.receive() == b"fine"
    with pytest.raises(ProtocolError):
        await channel.receive()
    assert line.calls == ["abort"]


async def test_a_flood_is_paused_then_cut() -> None:
    channel = PairingChannel("host")
    line = Line(channel)
    line.feed(framed(b"x") * QUEUE_LIMIT)
    assert line.calls == ["pause"]
    await channel.receive()
    assert line.calls == ["pause", "resume"]
    line.feed(framed(b"x") * 10 * QUEUE_LIMIT)
    assert line.calls[-1] == "abort"


async def test_too_long_a_message_is_its_authors_error() -> None:
    channel = PairingChannel("host")
    Line(channel)
    with pytest.raises(InternalError):
        await channel.send(bytes(MESSAGE_LIMIT_BYTES + 1))


async def test_a_full_stream_makes_the_sender_wait() -> None:
    channel = PairingChannel("host")
    line = Line(channel)
    channel.pause_writing()
    sending = asyncio.create_task(channel.send(b"a"))
    await asyncio.sleep(0)
    assert line.written == b""
    channel.resume_writing()
    await sending
    assert line.written == framed(b"a")


async def test_the_end_wakes_waiting_callers() -> None:
    channel = PairingChannel("host")
    Line(channel)
    channel.pause_writing()
    waiting = [asyncio.create_task(channel.receive()), asyncio.create_task(channel.send(b"a"))]
    await asyncio.sleep(0)
    channel.ended(None)
    for task in waiting:
        with pytest.raises(LinkClosed):
            await task
    await channel.closed


async def test_only_one_task_may_receive() -> None:
    channel = PairingChannel("host")
    line = Line(channel)
    first = asyncio.create_task(channel.receive())
    await asyncio.sleep(0)
    with pytest.raises(InternalError):
        await channel.receive()
    line.feed(framed(b"x"))
    assert await first == b"x"
