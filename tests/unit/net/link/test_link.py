"""A link's own decisions: stalls, flush limits, compression. Over the in-memory stream."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from p2ptrain.errors import InternalError, LinkClosed
from p2ptrain.net.encoder import OutgoingMessage
from p2ptrain.net.frame import Codec
from p2ptrain.net.link.flow_control import UNKNOWN, LinkSettings
from p2ptrain.net.link.link import Link
from p2ptrain.net.link.stream import StreamArrival, StreamUser
from p2ptrain.net.message import Message, PartKind, Priority
from tests.support import memory_links
from tests.support.links import FakeClock, Inbox

PEER = "ab" * 32


@dataclass
class FakeStream:
    """A stream that keeps what is written, and is fed by the test."""

    user: StreamUser
    written: bytearray = field(default_factory=bytearray)
    calls: list[str] = field(default_factory=list)
    full_after_bytes: int = 2**30
    unsent_bytes: int = 0
    arrived: StreamArrival | None = None

    def limit_unsent(self, count: int) -> None:
        self.unsent_bytes = count

    def hurry(self) -> None:
        self.calls.append("hurry")

    def arrival(self) -> StreamArrival | None:
        return self.arrived

    def write(self, buffers: Sequence[bytes | memoryview]) -> None:
        for buffer in buffers:
            self.written += buffer
        if len(self.written) > self.full_after_bytes:
            self.user.pause_writing()

    def pause_reading(self) -> None:
        self.calls.append("pause_reading")

    def resume_reading(self) -> None:
        self.calls.append("resume_reading")

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")
        self.user.ended(None)

    def feed(self, data: bytes) -> None:
        buffer = self.user.get_buffer()
        buffer[: len(data)] = data
        self.user.received(len(data))


def open_link(
    clock: FakeClock, settings: LinkSettings | None = None
) -> tuple[Link, FakeStream, Inbox]:
    inbox = Inbox()
    link = Link(PEER, inbox, settings, clock=clock)
    stream = FakeStream(link)
    link.opened(stream)
    return link, stream, inbox


def first_frame(size: int) -> bytes:
    outgoing = OutgoingMessage(Message("test", {}, (memoryview(bytes(size)),)), Priority.BULK)
    outgoing.start(0, lambda kind, part: Codec.RAW)
    frame = outgoing.next_frame(1000)
    assert frame is not None
    return b"".join(frame.buffers)


async def test_a_message_that_never_goes_on_ends_the_link() -> None:
    """S15: a message that never goes on ends the link."""
    clock = FakeClock()
    _, stream, inbox = open_link(clock)
    stream.feed(first_frame(10_000))
    clock.advance(9.0)
    assert inbox.losses == []
    clock.advance(3.0)
    assert isinstance(inbox.losses[0], LinkClosed)
    assert "10 s" in str(inbox.losses[0])


async def test_a_byte_a_second_does_not_keep_it_open() -> None:
    """S15: a byte a second does not keep it open."""
    clock = FakeClock()
    _, stream, inbox = open_link(clock)
    stream.feed(first_frame(10_000)[:5])
    for byte in first_frame(10_000)[5:20]:
        if inbox.losses:
            break
        stream.feed(bytes([byte]))
        clock.advance(1.0)
    assert len(inbox.losses) == 1


async def test_who_looks_has_the_few_bytes_of_a_slow_peer_read_too() -> None:
    """The kernel would hold them back until a whole frame is there."""
    link, stream, _ = open_link(FakeClock())
    link.look()
    assert link.look() == 0
    assert stream.calls == []  # nothing is under way
    stream.feed(first_frame(10_000))
    assert link.look() > 1000
    assert stream.calls == []
    link.look()
    assert stream.calls == ["hurry"]


async def test_what_arrived_below_counts_though_none_of_it_can_be_read() -> None:
    link, stream, _ = open_link(FakeClock())
    assert link.arrival() == StreamArrival(0)
    stream.feed(first_frame(10_000))
    assert link.arrival() == StreamArrival(link.statistics().received_bytes)
    stream.arrived = StreamArrival(12_000, packets_ahead=3)
    assert link.arrival() == StreamArrival(12_000, packets_ahead=3)


async def test_an_idle_link_stays() -> None:
    clock = FakeClock()
    link, stream, inbox = open_link(clock)
    clock.advance(3600.0)
    assert link.is_open
    assert stream.calls == []
    assert inbox.losses == []


async def test_a_link_that_we_paused_ourselves_does_not_stall() -> None:
    clock = FakeClock()
    link, stream, _ = open_link(clock)
    stream.feed(first_frame(10_000))
    link.pause_receiving()
    clock.advance(60.0)
    assert link.is_open
    link.resume_receiving()
    assert stream.calls == ["pause_reading", "resume_reading"]


async def test_closing_gives_up_flushing_after_a_while() -> None:
    clock = FakeClock()
    link, stream, inbox = open_link(clock)
    stream.full_after_bytes = 0
    await link.send(Message("a", {}, (memoryview(bytes(500_000)),)))
    link.close("bored")
    clock.advance(1.9)
    assert stream.calls == []
    clock.advance(0.2)
    assert stream.calls == ["abort"]
    assert "bored" in str(inbox.losses[0])


async def test_an_idle_link_closes_at_once() -> None:
    link, stream, _ = open_link(FakeClock())
    link.close("done")
    assert stream.calls == ["close"]


async def test_a_full_stream_gets_nothing_more() -> None:
    link, stream, _ = open_link(FakeClock())
    stream.full_after_bytes = 1
    await link.send(Message("a", {}, (memoryview(bytes(500_000)),)), Priority.BULK)
    taken = len(stream.written)
    assert taken < 140_000
    await link.send(Message("b"))
    assert len(stream.written) == taken
    stream.full_after_bytes = 2**30
    link.resume_writing()
    assert b"b" in stream.written[taken : taken + 40]  # the urgent one goes next


async def test_a_slow_link_is_given_little_at_a_time() -> None:
    clock = FakeClock()
    link, stream, _ = open_link(clock)
    stream.full_after_bytes = 0
    part = memoryview(bytes(300_000))
    await link.send(Message("a", {}, (part,)), Priority.BULK)
    written = len(stream.written)
    assert written > 30_000  # nobody knows the rate yet
    for _ in range(4):  # one frame in 0.3 s: below 1 Mbit/s
        clock.advance(0.3)
        link.resume_writing()
    assert stream.unsent_bytes == 8 * 1024
    before = len(stream.written)
    link.resume_writing()
    assert len(stream.written) - before < 5000


async def test_the_stream_learns_what_is_sure_to_come() -> None:
    link, stream, _ = open_link(FakeClock())
    frame = first_frame(1000)
    stream.feed(frame[:-600])
    assert link.expected_bytes() == 600
    stream.feed(frame[-600:])
    assert link.expected_bytes() == 0


async def test_the_loop_gets_its_turn_between_frames() -> None:
    link, stream, _ = open_link(FakeClock())
    await link.send(Message("a", {}, (memoryview(bytes(5_000_000)),)), Priority.BULK)
    assert len(stream.written) < 2_000_000
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(stream.written) > 5_000_000


async def test_the_lowest_lane_gives_way_after_each_frame() -> None:
    link, stream, _ = open_link(FakeClock())
    await link.send(Message("copy", {}, (memoryview(bytes(500_000)),)), Priority.REPLICA)
    one_frame = len(stream.written)
    assert one_frame <= UNKNOWN.lowest_frame_bytes + 100
    await link.send(Message("a", {}, (memoryview(b"b" * 10),)), Priority.TENSOR)
    assert b"b" * 10 in stream.written[one_frame : one_frame + 100]
    while link.statistics().queued_bytes:
        before = len(stream.written)
        await asyncio.sleep(0)
        assert len(stream.written) - before <= UNKNOWN.lowest_frame_bytes + 100
    assert len(stream.written) > 500_000


async def test_an_unusable_message_is_its_authors_error() -> None:
    link, stream, _ = open_link(FakeClock())
    with pytest.raises(InternalError):
        await link.send(Message("not a kind"))
    assert link.is_open
    assert not stream.written


async def test_sending_before_the_stream_opens_is_refused() -> None:
    link = Link(PEER, Inbox())
    with pytest.raises(LinkClosed, match="not open yet"):
        await link.send(Message("a"))


async def test_noise_ends_the_link() -> None:
    _, stream, inbox = open_link(FakeClock())
    stream.feed(b"GET / HTTP/1.1\r\n\r\n")
    assert stream.calls == ["abort"]
    assert "magic" in str(inbox.losses[0])


async def test_an_abort_inside_deliver_stops_delivery() -> None:
    link, stream, inbox = open_link(FakeClock())
    inbox.on_deliver = link.abort
    frame = encode_single()
    stream.feed(frame + frame)
    assert len(inbox.messages) == 1
    assert len(inbox.losses) == 1


def encode_single() -> bytes:
    outgoing = OutgoingMessage(Message("one"), Priority.CONTROL)
    outgoing.start(0, lambda kind, part: Codec.RAW)
    frame = outgoing.next_frame()
    assert frame is not None
    return b"".join(frame.buffers)


def relu_like(size: int) -> bytes:
    """Half zeros in runs, as activations after a ReLU: they shrink."""
    generator = random.Random(2)
    return b"".join(
        bytes(64) if generator.random() < 0.6 else generator.randbytes(64)
        for _ in range(size // 64)
    )


async def send_all(link: Link, messages: list[Message]) -> None:
    for message in messages:
        await link.send(message, Priority.TENSOR)


class ImmediateExecutor(Executor):
    """Works at once, in the caller's thread; its results still arrive a turn later."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        future: Future[object] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@pytest.mark.parametrize("executor", [None, ImmediateExecutor()], ids=["in place", "executor"])
async def test_compression_starts_on_a_slow_link_and_loses_nothing(
    executor: Executor | None,
) -> None:
    left_inbox, right_inbox = Inbox(), Inbox()
    clock = FakeClock()
    left = Link(PEER, left_inbox, executor=executor, clock=clock)
    right = Link(PEER, right_inbox, clock=clock)
    memory_links.connect(left, right)
    content = relu_like(100_000) * 20
    message = Message("a", {}, (memoryview(content),), (PartKind.ACTIVATION,))
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(send_all(left, [message] * 12))
            while len(right_inbox.messages) < 12:
                clock.advance(0.005)  # a turn of the loop carries 256 KiB: 50 MB/s
                await asyncio.sleep(0)
    finally:
        left.abort()
        await left.closed
        await right.closed
    assert all(item.parts[0] == content for item in right_inbox.messages)
    counters = left.statistics()
    assert counters.sent_bytes < 0.8 * counters.sent_parts_bytes
    assert (counters.link_bytes_per_s or 0) < 80e6


async def test_a_compressor_that_is_gone_ends_the_link_with_a_reason() -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    inbox, clock = Inbox(), FakeClock()
    link = Link(PEER, inbox, executor=executor, clock=clock)
    stream = FakeStream(link, full_after_bytes=0)
    link.opened(stream)
    part = memoryview(bytes(100_000))
    for _ in range(2):
        await link.send(Message("a", {}, (part,), (PartKind.WEIGHT,)), Priority.BULK)
    for _ in range(40):  # one frame at a time, each after a wait: a slow link
        clock.advance(0.15)
        link.resume_writing()
    assert "compression failed" in str(inbox.losses[0])
