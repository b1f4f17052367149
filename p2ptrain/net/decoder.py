"""The receiving half of the framing, without IO: memory to fill goes out, messages come back.

Bytes of large raw parts are written by the transport straight into the buffers their owner gave;
everything small is read through one scratch buffer, many small messages at a time.

    transport: view = decoder.get_buffer(); n = read_into(view); decoder.received(n)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p2ptrain.errors import InternalError, ProtocolError
from p2ptrain.net.frame import (
    BLOCK_BYTES,
    NUMBER_MODULUS,
    PREFIX_BYTES,
    Codec,
    Filling,
    Header,
    Prefix,
    decode_header,
    decode_prefix,
    fill_blocks,
)
from p2ptrain.net.message import HEADER_LIMIT_BYTES, Message, PartKind, Priority

SCRATCH_BYTES = 8 * 1024
"""Small, so that what follows a frame's header is not read here and copied."""

DIRECT_BYTES = 4 * 1024
"""From here on a read goes straight into its destination; below it, one read takes several."""

_BYTE_FORMATS = ("B", "<B", "@B")

assert SCRATCH_BYTES >= PREFIX_BYTES + HEADER_LIMIT_BYTES


class _Incoming:
    """One unfinished message: `target` is the memory its next bytes belong to, empty at its end."""

    __slots__ = ("_filling", "message", "target")

    def __init__(self, message: Message, filling: Filling | None) -> None:
        self.message = message
        self.target = _NOTHING
        self._filling = filling
        if filling is not None:
            self._next(filling)

    def advance(self, count: int) -> None:
        """The first `count` bytes of `target` are there now."""
        self.target = self.target[count:]
        if not self.target and self._filling is not None:
            self._next(self._filling)

    def _next(self, filling: Filling) -> None:
        for target in filling:
            if target:
                self.target = target
                return


_NOTHING = memoryview(b"")


class FrameDecoder:
    """Frames in, messages out; any breach of the protocol raises and ends the decoder's life.

    Args:
        open_parts: (lane, header) -> writable buffers of exactly `header.part_bytes`; asked once
            for each message with parts, before its body is read. None: they are read block by block
            and thrown away, and the message comes without them. Raises ProtocolError to refuse.
        deliver: (lane, message), in order within a lane.
    """

    def __init__(
        self,
        open_parts: Callable[[Priority, Header], Sequence[memoryview] | None],
        deliver: Callable[[Priority, Message], None],
    ) -> None:
        self._open_parts = open_parts
        self._deliver = deliver
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._begin = 0  # unparsed bytes are _scratch[_begin:_end]
        self._end = 0
        self._direct = False  # whether the last get_buffer() gave a part's own memory
        self._frame: Prefix | None = None  # whose payload is being read
        self._reading: _Incoming | None = None  # the message it belongs to
        self._payload_left = 0
        self._unfinished: dict[Priority, _Incoming] = {}
        self._numbers = [0] * len(Priority)
        self._stopped = False

    @property
    def partial(self) -> bool:
        """Whether a message has begun and not ended: its sender owes us bytes."""
        return bool(self._unfinished) or self._begin < self._end

    @property
    def expected_bytes(self) -> int:
        """How many bytes are missing of the frame that is being read."""
        return self._payload_left if self._frame is not None else 0

    def stop(self) -> None:
        """Deliver nothing more, whatever is still in the scratch buffer."""
        self._stopped = True
        self._begin = self._end = 0
        self._unfinished.clear()
        self._frame = self._reading = None

    def get_buffer(self) -> memoryview:
        """Writable memory, never empty, for the next bytes of the stream."""
        if self._begin == self._end:
            target = self._target()
            if len(target) >= DIRECT_BYTES:
                self._direct = True
                return target
            self._begin = self._end = 0
            self._direct = False
            return self._scratch
        self._direct = False
        if self._end > SCRATCH_BYTES - PREFIX_BYTES - HEADER_LIMIT_BYTES:
            rest = bytes(self._scratch[self._begin : self._end])
            self._scratch[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        return self._scratch[self._end :]

    def received(self, count: int) -> None:
        """The first `count` bytes of the last `get_buffer()` are there now.

        Raises:
            ProtocolError: the peer broke the protocol; use the decoder no more.
        """
        if self._direct:
            self._consume_payload(count)
            return
        self._end += count
        while self._begin < self._end and not self._stopped and self._parse():
            pass

    def _target(self) -> memoryview:
        """Where payload goes next: empty between payloads."""
        if self._reading is None:
            return _NOTHING
        target = self._reading.target
        return target if len(target) <= self._payload_left else target[: self._payload_left]

    def _parse(self) -> bool:
        """Take one step through the scratch buffer; False when it holds too little."""
        if self._frame is not None:
            return self._copy_payload()
        body = self._begin + PREFIX_BYTES
        if body > self._end:
            return False
        prefix = decode_prefix(self._scratch[self._begin : body])
        if body + prefix.header_bytes > self._end:
            return False
        self._begin = body + prefix.header_bytes
        self._open_frame(prefix, bytes(self._scratch[body : self._begin]))
        return True

    def _copy_payload(self) -> bool:
        target = self._target()
        count = min(len(target), self._end - self._begin)
        if not count:
            return False
        target[:count] = self._scratch[self._begin : self._begin + count]
        self._begin += count
        self._consume_payload(count)
        return True

    def _open_frame(self, prefix: Prefix, header: bytes) -> None:
        lane = prefix.lane
        if prefix.number != self._numbers[lane]:
            raise ProtocolError(f"message {prefix.number} came out of order on lane {lane.name}")
        if header:
            if lane in self._unfinished:
                raise ProtocolError(f"a message began inside another on lane {lane.name}")
            self._unfinished[lane] = self._open_message(lane, decode_header(header))
        elif lane not in self._unfinished:
            raise ProtocolError(f"a message continues that never began on lane {lane.name}")
        if self._stopped:
            return
        self._frame = prefix
        self._reading = self._unfinished[lane]
        self._payload_left = prefix.payload_bytes
        if not prefix.payload_bytes or not self._reading.target:
            self._consume_payload(0)  # the end, or too much

    def _open_message(self, lane: Priority, header: Header) -> _Incoming:
        if not header.part_bytes:
            return _Incoming(_message(header), None)
        opened = self._open_parts(lane, header)
        if opened is None:
            return _Incoming(_message(header), _discard(header.part_bytes))
        buffers = tuple(opened)
        _check_buffers(header, buffers)
        message = _message(header, buffers, header.part_kinds)
        return _Incoming(message, _fill(buffers))

    def _consume_payload(self, count: int) -> None:
        """`count` payload bytes have reached their target; finish the frame with its last one."""
        frame, incoming = self._frame, self._reading
        if frame is None or incoming is None or self._stopped:
            return
        self._payload_left -= count
        if count:
            incoming.advance(count)
        if self._payload_left:
            if not incoming.target:
                raise ProtocolError("a message is longer than its parts")
            return
        last = frame.last
        if last == bool(incoming.target):
            raise ProtocolError("a message ends before or after its parts do")
        self._frame = self._reading = None
        if last:
            self._finish(frame.lane)

    def _finish(self, lane: Priority) -> None:
        message = self._unfinished.pop(lane).message
        self._numbers[lane] = (self._numbers[lane] + 1) % NUMBER_MODULUS
        self._deliver(lane, message)


def _message(
    header: Header, parts: tuple[memoryview, ...] = (), kinds: tuple[PartKind, ...] = ()
) -> Message:
    return Message(header.kind, header.fields, parts, kinds, header.header_bytes)


def _check_buffers(header: Header, buffers: Sequence[memoryview]) -> None:
    """A receiver that opens other memory than asked for has a bug: better here than in the data."""
    sizes = tuple([buffer.nbytes for buffer in buffers])
    fit = sizes == header.part_bytes
    for buffer in buffers:
        fit &= buffer.format in _BYTE_FORMATS and buffer.ndim == 1 and not buffer.readonly
    if not fit:
        raise InternalError(
            f"the receiver of {header.kind!r} opened buffers of {sizes} bytes for parts of "
            f"{header.part_bytes}, or not as flat writable bytes"
        )


def _fill(buffers: Sequence[memoryview]) -> Filling:
    """The body of a message: the codecs of its parts, then each part."""
    codecs = memoryview(bytearray(len(buffers)))
    yield codecs
    for codec, buffer in zip(codecs, buffers, strict=True):
        yield from _fill_part(buffer, codec)


def _discard(sizes: Sequence[int]) -> Filling:
    """As `_fill`, into memory for one block: whatever comes, it takes no more."""
    codecs = memoryview(bytearray(len(sizes)))
    yield codecs
    block = memoryview(bytearray(min(BLOCK_BYTES, max(sizes))))
    for codec, size in zip(codecs, sizes, strict=True):
        for start in range(0, size or 1, BLOCK_BYTES):  # an empty part has a codec too
            yield from _fill_part(block[: size - start], codec)


def _fill_part(buffer: memoryview, codec: int) -> Filling:
    if codec == Codec.RAW:
        yield buffer
    elif codec in (Codec.LZ4, Codec.SHUFFLED):
        yield from fill_blocks(buffer, Codec(codec))
    else:
        raise ProtocolError(f"a part has the unknown codec {codec}")
