"""A link: messages to and from one device, over one byte stream.

    send() -> SendQueue (lanes, budgets) -> frames -> stream ... stream -> FrameDecoder -> deliver()

One frame at a time is handed to the stream, and only while its buffers have room, so an urgent
message waits for at most the frames already on their way. The peer's identity comes from the
stream's certificate, never from a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Protocol

from p2ptrain.errors import LinkClosed, PeerError
from p2ptrain.logs import get_logger
from p2ptrain.net.decoder import FrameDecoder
from p2ptrain.net.encoder import OutgoingMessage
from p2ptrain.net.frame import Header
from p2ptrain.net.link.compression import CompressionChooser, LinkCompression
from p2ptrain.net.link.flow_control import (
    UNKNOWN,
    LinkCounters,
    LinkRateMeter,
    LinkSettings,
    LoopClock,
    StallWatch,
    SystemClock,
    Timer,
    portions,
)
from p2ptrain.net.link.send_queue import Outbox, SendQueue
from p2ptrain.net.link.stream import ByteStream, StreamArrival
from p2ptrain.net.message import Message, Priority

READ_BYTES = 288 * 1024
"""Room for the largest frame with what its TLS records add."""

FRAMES_A_TURN = 8
"""Frames written before the event loop gets its turn, where the stream takes all we give."""

_log = get_logger(__name__)


class LinkReceiver(Protocol):
    """Who takes a link's messages. Called on the event loop; nothing here may block."""

    def open_parts(self, link: Link, header: Header) -> Sequence[memoryview] | None:
        """Writable flat byte buffers of exactly `header.part_bytes`, for a message with parts.

        None: the parts are thrown away, and the message comes without them.
        Raises ProtocolError where the message or its sizes are not expected: the link closes.
        """

    def deliver(self, link: Link, message: Message) -> None:
        """A whole message, in order within its lane."""

    def lost(self, link: Link, error: PeerError) -> None:
        """Last call, exactly once: the link has ended, and why."""


class Link:
    """One link. Made by `dial` or a `Listener`; then `send`, and `close` or `abort`."""

    read_bytes = READ_BYTES

    def __init__(
        self,
        peer_id: str,
        receiver: LinkReceiver,
        settings: LinkSettings | None = None,
        executor: Executor | None = None,
        clock: LoopClock | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.peer_id = peer_id
        self._receiver = receiver
        self._settings = settings or LinkSettings()
        self._clock: LoopClock = clock or SystemClock(loop)
        self._loop = loop
        self._compression = LinkCompression(
            CompressionChooser(self._settings.compression),
            executor,
            self._clock.time,
            self._blocks_ready,
        )
        self._outbox = Outbox(self._settings.budgets_bytes(), self._compression.choose)
        self._queue = SendQueue(self._outbox)
        self._decoder = FrameDecoder(self._open_parts, self._deliver)
        self._meter = LinkRateMeter()
        self._portions = UNKNOWN
        self._known_rates: tuple[float | None, float] = (None, 0.0)  # what they were made for
        self._stall = StallWatch(self._settings.stall_seconds, self._settings.stall_bytes)
        self._stall_timer: Timer | None = None
        self._flush_timer: Timer | None = None
        self._stream: ByteStream | None = None
        self._error: PeerError | None = None  # why it ends; sending is over once this is set
        self._writing_paused = False
        self._receiving_paused = False
        self._turn_taken = False  # whether a further _pump is already scheduled
        self._closed: asyncio.Future[None] = loop.create_future()
        self._sent_bytes = self._received_bytes = self._sent_parts_bytes = 0
        self._sent_messages = self._received_messages = 0
        self._looked_at_bytes = 0  # received until the last `look`

    # For the rooms above

    @property
    def closed(self) -> asyncio.Future[None]:
        """Await it to know that the link has ended; `done()` says so at once."""
        return asyncio.shield(self._closed)

    def look(self) -> int:
        """Bytes received so far; those of a slow peer, too, which the kernel holds back as few.

        Where none came since the last look, what comes next is read at once, however little it is.
        """
        count, before = self._received_bytes, self._looked_at_bytes
        self._looked_at_bytes = count
        if count == before and self._decoder.partial and self._stream is not None:
            self._stream.hurry()
        return count

    def arrival(self) -> StreamArrival:
        """What has come so far, in part or not to be read yet: more than this link has received."""
        below = None if self._stream is None else self._stream.arrival()
        return below or StreamArrival(self._received_bytes)

    def ends(self) -> tuple[str, str] | None:
        """The IPs that it runs between, this device's first; None where there is no network."""
        return None if self._stream is None else self._stream.ends()

    @property
    def is_open(self) -> bool:
        """Whether `send` still takes messages."""
        return self._stream is not None and self._error is None

    async def send(self, message: Message, priority: Priority = Priority.CONTROL) -> None:
        """Queue `message`, once its lane's budget has room.

        Its parts must not change before they are on the wire: the caller gives them away.

        Raises:
            LinkClosed: the link has ended, or ended while this waited.
            InternalError: the message cannot be encoded.
        """
        outgoing = self._outgoing(message, priority)
        if not self._queue.put_now(outgoing):
            await self._queue.put(outgoing)
        self._queued(message)

    def send_now(self, message: Message, priority: Priority = Priority.CONTROL) -> bool:
        """Queue `message` if it need not wait for room; whether it did. Raises as `send`."""
        queued = self._queue.put_now(self._outgoing(message, priority))
        if queued:
            self._queued(message)
        return queued

    def _outgoing(self, message: Message, priority: Priority) -> OutgoingMessage:
        outgoing = OutgoingMessage(message, priority)
        if self._stream is None or self._error is not None:
            raise self._refusal()
        return outgoing

    def _queued(self, message: Message) -> None:
        self._sent_messages += 1
        if message.parts:
            self._sent_parts_bytes += message.parts_bytes
        self._pump()

    def pause_receiving(self) -> None:
        """Take no more bytes for now: all lanes of the peer wait, heartbeats too."""
        self._receiving_paused = True
        if self._stream is not None:
            self._stream.pause_reading()

    def resume_receiving(self) -> None:
        """Take bytes again."""
        self._receiving_paused = False
        if self._stream is not None:
            self._stream.resume_reading()

    def close(self, reason: str) -> None:
        """Refuse further messages, send what is queued (for `flush_seconds`), then end the link."""
        if not self.is_open:
            return
        self._stop_sending(LinkClosed(f"this device closed the link: {reason}"))
        self._flush_timer = self._clock.call_later(self._settings.flush_seconds, self._end_now)
        self._pump()

    def abort(self, reason: str = "aborted") -> None:
        """End the link now; what is queued is lost."""
        self._fail(LinkClosed(f"this device closed the link: {reason}"))

    def statistics(self) -> LinkCounters:
        """Counters up to now."""
        return LinkCounters(
            sent_bytes=self._sent_bytes,
            received_bytes=self._received_bytes,
            sent_parts_bytes=self._sent_parts_bytes,
            sent_messages=self._sent_messages,
            received_messages=self._received_messages,
            queued_bytes=sum(self._outbox.queued_bytes(lane) for lane in Priority),
            link_bytes_per_s=self._meter.bytes_per_s,
        )

    # For the stream below (StreamUser)

    def opened(self, stream: ByteStream) -> None:
        """The stream is connected."""
        self._stream = stream
        self._watch_stall()

    def get_buffer(self) -> memoryview:
        """Memory for the next bytes."""
        return self._decoder.get_buffer()

    def expected_bytes(self) -> int:
        """What is missing of the frame under way."""
        return self._decoder.expected_bytes

    def received(self, count: int) -> None:
        """Bytes came."""
        self._received_bytes += count
        try:
            self._decoder.received(count)
        except PeerError as error:
            _log.warning("link broken by the peer", peer=self.peer_id, error=str(error))
            self._fail(error)

    def pause_writing(self) -> None:
        """The stream is full."""
        self._writing_paused = True
        self._meter.waited()

    def resume_writing(self) -> None:
        """The stream has room."""
        self._writing_paused = False
        self._pump()

    def ended(self, error: PeerError | None) -> None:
        """The stream is gone."""
        reason = self._error or error or LinkClosed("the other device closed the link")
        self._stop_sending(reason)
        self._decoder.stop()
        self._outbox.clear()
        self._compression.cancel()
        for timer in (self._stall_timer, self._flush_timer):
            if timer is not None:
                timer.cancel()
        if not self._closed.done():
            self._closed.set_result(None)
            self._receiver.lost(self, reason)

    # Sending

    def _pump(self) -> None:
        """Hand frames to the stream while it takes them, the most urgent first."""
        stream = self._stream
        if stream is None:
            return
        for _ in range(FRAMES_A_TURN):
            if self._writing_paused:
                return
            if not self._outbox.messages:
                self._rest(stream)
                return
            lane = self._write_frame(stream)
            if lane is None:
                return  # what is next is being compressed
            if lane is Priority.REPLICA:
                break  # no caller waits for it, but for what may have come meanwhile
        if not self._turn_taken:
            self._turn_taken = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn_taken = False
        self._pump()

    def _write_frame(self, stream: ByteStream) -> Priority | None:
        """Write one frame, if one is ready; whose."""
        if self._outbox.packing:
            self._compression.start_jobs(self._outbox)
        sizes = self._portions
        frame = self._outbox.next_frame(sizes.frame_bytes, sizes.lowest_frame_bytes)
        if frame is None:
            return None
        self._sent_bytes += frame.wire_bytes
        stream.write(frame.buffers)
        self._meter.wrote(frame.wire_bytes, self._clock.time())
        meter = self._meter
        if (meter.bytes_per_s, meter.at_least_bytes_per_s) != self._known_rates:
            self._apportion(stream)
        self._queue.admit(frame.lane)
        return frame.lane

    def _apportion(self, stream: ByteStream) -> None:
        """Give the stream as much at a time as suits the link's rate, which has changed."""
        rates = self._known_rates = (self._meter.bytes_per_s, self._meter.at_least_bytes_per_s)
        self._compression.chooser.observe_link(rates[0])
        now = portions(*rates)
        if now != self._portions:
            self._portions = now
            stream.limit_unsent(now.unsent_bytes)

    def _rest(self, stream: ByteStream) -> None:
        """Nothing is queued."""
        self._meter.idle(self._clock.time())
        if self._error is not None:
            stream.close()

    def _blocks_ready(self, error: BaseException | None) -> None:
        if error is None:
            self._pump()
        else:
            self._fail(LinkClosed(f"compression failed on this device: {error}"))

    # Receiving

    def _open_parts(self, lane: Priority, header: Header) -> Sequence[memoryview] | None:
        return self._receiver.open_parts(self, header)

    def _deliver(self, lane: Priority, message: Message) -> None:
        self._received_messages += 1
        self._receiver.deliver(self, message)

    def _watch_stall(self) -> None:
        partial = self._decoder.partial and not self._receiving_paused
        seconds = self._settings.stall_seconds
        if self._stall.stalled(partial, self._received_bytes, self._clock.time()):
            self._fail(LinkClosed(f"the other device stopped for {seconds:g} s within a message"))
        else:
            if partial and self._stream is not None:
                self._stream.hurry()  # a slow peer's bytes count although they are few
            self._stall_timer = self._clock.call_later(seconds / 10, self._watch_stall)

    # Ending

    def _refusal(self) -> LinkClosed:
        return LinkClosed(f"no link to device {self.peer_id[:8]}: {self._error or 'not open yet'}")

    def _stop_sending(self, error: PeerError) -> None:
        """From now on nothing new is taken; the first reason stays."""
        if self._error is None:
            self._error = error
        self._queue.fail(self._refusal())

    def _fail(self, error: PeerError) -> None:
        if not self._closed.done():
            self._stop_sending(error)
            self._end_now()

    def _end_now(self) -> None:
        self._decoder.stop()
        if self._stream is not None:
            self._stream.abort()
