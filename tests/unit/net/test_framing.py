"""Both halves of the framing together, without IO: what goes in comes out, lies do not."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import lz4.block
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import InternalError, ProtocolError
from p2ptrain.net.decoder import FrameDecoder
from p2ptrain.net.encoder import OutgoingMessage
from p2ptrain.net.frame import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    STORED,
    Codec,
    FrameFlag,
    Header,
    Prefix,
    encode_block,
    encode_header,
    pack_prefix,
)
from p2ptrain.net.message import Message, PartKind, Priority

FIRST, LAST, NONE = FrameFlag.FIRST, FrameFlag.LAST, FrameFlag(0)
TENSOR, BULK = Priority.TENSOR, Priority.BULK


@dataclass
class Reader:
    """A decoder with somebody behind it who takes every message."""

    delivered: list[tuple[Priority, Message]] = field(default_factory=list)
    allocated_bytes: int = 0
    on_deliver: Callable[[], None] = lambda: None
    unwanted: str = "unwanted"

    def __post_init__(self) -> None:
        self.decoder = FrameDecoder(self.open_parts, self.deliver)

    def open_parts(self, lane: Priority, header: Header) -> Sequence[memoryview] | None:
        if header.kind == self.unwanted:
            return None
        if sum(header.part_bytes) > 2**24:
            raise ProtocolError("not expected")
        self.allocated_bytes += sum(header.part_bytes)
        return [memoryview(bytearray(size)) for size in header.part_bytes]

    def deliver(self, lane: Priority, message: Message) -> None:
        self.delivered.append((lane, message))
        self.on_deliver()

    def feed(self, data: bytes, most: int = 2**30) -> None:
        """Read `data` as a transport would, at most `most` bytes at a time."""
        left = memoryview(data)
        while left:
            buffer = self.decoder.get_buffer()
            count = min(len(buffer), len(left), most)
            buffer[:count] = left[:count]
            left = left[count:]
            self.decoder.received(count)


def message(*parts: bytes, kind: str = "test", **fields: int) -> Message:
    return Message(kind, fields, tuple(memoryview(part) for part in parts))


def encode(
    item: Message,
    codec: Codec = Codec.RAW,
    lane: Priority = TENSOR,
    number: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[bytes]:
    """All frames of a message."""
    outgoing = OutgoingMessage(item, lane)
    outgoing.start(number, lambda kind, part: codec)
    frames = []
    while not outgoing.finished:
        if job := outgoing.compression_job():
            outgoing.compressed([encode_block(block, job.codec) for block in job.blocks])
        if frame := outgoing.next_frame(chunk_bytes):
            frames.append(b"".join(frame.buffers))
            assert len(frames[-1]) == frame.wire_bytes
    assert outgoing.unsent_bytes == 0
    return frames


def contents(reader: Reader) -> list[tuple[str, list[bytes]]]:
    return [(item.kind, [bytes(part) for part in item.parts]) for _, item in reader.delivered]


def _floats(count: int, odd_bytes: int) -> bytes:
    """Shrinks when its bytes are sorted, and is no whole number of elements."""
    return struct.pack(f"{count}f", *(number * 0.37 for number in range(count))) + bytes(odd_bytes)


part_contents = st.one_of(
    st.builds(_floats, st.integers(0, 50_000), st.integers(0, 3)),
    st.binary(max_size=100),
    st.builds(
        lambda byte, size: bytes([byte]) * size, st.integers(0, 255), st.integers(0, 300_000)
    ),
    st.builds(
        lambda seed, size: random.Random(seed).randbytes(size),
        st.integers(0, 9),
        st.integers(0, 200_000),
    ),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(part_contents, max_size=4),
    st.sampled_from(Codec),
    st.sampled_from([1000, 65536, CHUNK_BYTES]),
    st.sampled_from([7000, 65537, 2**30]),
)
def test_round_trip(parts: list[bytes], codec: Codec, chunk_bytes: int, read_bytes: int) -> None:
    reader = Reader()
    frames = encode(message(*parts, n=len(parts)), codec, chunk_bytes=chunk_bytes)
    reader.feed(b"".join(frames), read_bytes)
    assert contents(reader) == [("test", parts)]
    assert reader.delivered[0][1].fields == {"n": len(parts)}
    assert not reader.decoder.partial


def test_single_bytes_at_a_time() -> None:
    reader = Reader()
    frames = encode(message(b"ab" * 40, b"", b"c"), Codec.LZ4) + encode(message(), number=1)
    reader.feed(b"".join(frames), 1)
    assert contents(reader) == [("test", [b"ab" * 40, b"", b"c"]), ("test", [])]


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("read_bytes", [1001, 2**30])
def test_parts_that_no_handler_wants_are_read_and_gone(codec: Codec, read_bytes: int) -> None:
    parts = [_floats(100_000, 3), b"", bytes(BLOCK_BYTES), b"x"]
    frames = encode(message(*parts, kind="unwanted", n=1), codec)
    frames += encode(message(b"wanted", n=2), codec, number=1)
    reader = Reader()
    reader.feed(b"".join(frames), read_bytes)
    assert contents(reader) == [("unwanted", []), ("test", [b"wanted"])]
    assert reader.delivered[0][1].fields == {"n": 1}
    assert reader.allocated_bytes == len(b"wanted")
    assert not reader.decoder.partial


def test_parts_that_no_handler_wants_take_the_memory_of_a_block() -> None:
    data = encode(message(bytes(CHUNK_BYTES), bytes(CHUNK_BYTES), kind="unwanted"))[0]
    reader = Reader()
    begun = 16 + len(encode_header("unwanted", {}, [CHUNK_BYTES] * 2)) + 2
    reader.feed(data[:begun])
    places: set[int] = set()
    for _ in range(CHUNK_BYTES // BLOCK_BYTES):
        place = reader.decoder.get_buffer()
        assert place.nbytes <= BLOCK_BYTES
        places.add(id(place.obj))
        reader.decoder.received(place.nbytes)
    assert len(places) == 1


@pytest.mark.parametrize("size", [0, 3])
def test_parts_that_no_handler_wants_must_have_a_known_codec_too(size: int) -> None:
    header = encode_header("unwanted", {}, [size])
    with pytest.raises(ProtocolError, match="codec 3"):
        Reader().feed(raw_frame(FIRST | LAST, header, b"\x03abc"))


def test_empty_parts_at_the_border_of_a_frame_end_the_message() -> None:
    part = b"x" * 99  # with the two codec bytes before it: exactly one frame
    for codec in Codec:
        frames = encode(message(part, b"", b""), codec, chunk_bytes=102)
        reader = Reader()
        reader.feed(b"".join(frames))
        assert contents(reader) == [("test", [part, b"", b""])]


def test_large_raw_parts_are_read_in_place() -> None:
    reader = Reader()
    data = encode(message(bytes(CHUNK_BYTES)))[0]
    begun = 16 + len(encode_header("test", {}, [CHUNK_BYTES])) + 1
    reader.feed(data[:begun])
    buffer = reader.decoder.get_buffer()
    assert buffer.nbytes == CHUNK_BYTES - 1  # the frame's payload less the codec byte
    buffer[:3] = b"abc"
    reader.decoder.received(3)
    reader.feed(data[begun + 3 :] + encode(message(bytes(CHUNK_BYTES)))[1])
    assert bytes(reader.delivered[0][1].parts[0][:4]) == b"abc\0"


def test_urgent_lanes_pass_between_frames() -> None:
    reader = Reader()
    bulk = encode(message(bytes(300_000), kind="bulk"), lane=BULK)
    urgent = encode(message(kind="beat"), lane=Priority.CONTROL)
    tensor = encode(message(bytes(200_000), kind="tensor"), lane=TENSOR)
    reader.feed(b"".join([bulk[0], tensor[0], *urgent, *tensor[1:], *bulk[1:]]))
    assert [item.kind for _, item in reader.delivered] == ["beat", "tensor", "bulk"]


@pytest.mark.parametrize(
    "build",
    [
        lambda two, other: [two[0], other[0]],  # a second start
        lambda two, other: [two[1]],  # goes on without a start
        lambda two, other: [two[0], two[0]],  # duplicated start
        lambda two, other: [*two, two[0]],  # repeated message
        lambda two, other: [*two, two[1]],  # repeated last frame
        lambda two, other: [other[0]],  # number skipped
        lambda two, other: [two[0], other[1]],  # another message's end
    ],
)
def test_frames_out_of_order_are_refused(
    build: Callable[[list[bytes], list[bytes]], list[bytes]],
) -> None:
    two, other = encode(message(bytes(200_000))), encode(message(bytes(200_000)), number=1)
    assert len(two) == 2
    with pytest.raises(ProtocolError):
        Reader().feed(b"".join(build(two, other)))


def raw_frame(flags: FrameFlag, header: bytes, payload: bytes, claimed: int | None = None) -> bytes:
    size = len(payload) if claimed is None else claimed
    return pack_prefix(*Prefix(TENSOR, flags, len(header), size, 0)) + header + payload


def test_a_body_longer_than_its_parts_is_refused() -> None:
    header = encode_header("test", {}, [10])
    with pytest.raises(ProtocolError, match="longer"):
        Reader().feed(raw_frame(FIRST | LAST, header, bytes(12)))


@pytest.mark.parametrize("flags", [FIRST | LAST, FIRST])
def test_the_last_flag_stands_exactly_at_the_end(flags: FrameFlag) -> None:
    size = 10 if flags & LAST else 9
    header = encode_header("test", {}, [size])
    with pytest.raises(ProtocolError, match="before or after"):
        Reader().feed(raw_frame(flags, header, bytes(10)))


def test_a_body_without_parts_is_refused() -> None:
    with pytest.raises(ProtocolError):
        Reader().feed(raw_frame(FIRST | LAST, encode_header("test", {}), b"x"))


def test_an_unknown_codec_is_refused() -> None:
    header = encode_header("test", {}, [3])
    with pytest.raises(ProtocolError, match="codec 3"):
        Reader().feed(raw_frame(FIRST | LAST, header, b"\x03abc"))


def test_unexpected_sizes_are_refused_before_memory_is_taken() -> None:
    """S14: what is expected here counts."""
    reader = Reader()
    header = encode_header("test", {}, [2**40])
    with pytest.raises(ProtocolError, match="not expected"):
        reader.feed(raw_frame(FIRST, header, bytes(100)))
    assert reader.allocated_bytes == 0


def lz4_frame(raw_bytes: int, body: bytes) -> bytes:
    header = encode_header("test", {}, [raw_bytes])
    return raw_frame(FIRST | LAST, header, bytes([Codec.LZ4]) + body)


def block(content: bytes, claimed: int | None = None) -> bytes:
    return struct.pack("!I", len(content) if claimed is None else claimed) + content


def packed(raw: bytes) -> bytes:
    result: bytes = lz4.block.compress(raw, store_size=False)
    return result


@pytest.mark.parametrize(
    "body",
    [
        block(packed(bytes(5000))),  # unpacks to more than the part
        block(packed(bytes(999))),  # one byte less
        block(packed(bytes(1001))),
        block(packed(bytes(2**24))),  # ratio 250:1
        block(b"", 0),
        block(bytes(10), 2**31 - 1),
        block(bytes(1000), 1000),  # "compressed" to the raw size
        block(bytes(900), 900 | STORED),  # stored, but shorter
        block(bytes(10), 2**32 - 1),
        block(b"\xff" * 400),
        block(lz4.block.compress(bytes(1000))),  # with a size of its own in front
    ],
)
def test_lz4_bombs_and_lies_are_refused(body: bytes) -> None:
    """S14: lz4 bombs and lies are refused."""
    reader = Reader()
    with pytest.raises(ProtocolError):
        reader.feed(lz4_frame(1000, body))
    assert reader.allocated_bytes == 1000


def test_lz4_as_it_should_be_is_accepted() -> None:
    reader = Reader()
    reader.feed(lz4_frame(1000, block(packed(bytes(1000)))))
    assert contents(reader) == [("test", [bytes(1000)])]


def test_blocks_that_do_not_shrink_are_stored() -> None:
    part = random.Random(0).randbytes(2 * BLOCK_BYTES + 5)
    frames = b"".join(encode(message(part), Codec.LZ4))
    assert len(frames) < len(part) + 200
    reader = Reader()
    reader.feed(frames)
    assert contents(reader) == [("test", [part])]


def test_mutated_frames_give_protocol_errors_only() -> None:
    generator = random.Random(3)
    seeds = [
        b"".join(encode(message(bytes(300), b"ab" * 99, n=1), codec, lane=lane, chunk_bytes=150))
        for codec in Codec
        for lane in Priority
    ]
    outcomes = {"refused": 0, "other": 0}
    for _ in range(6_000):
        data = bytearray(generator.choice(seeds))
        for _ in range(generator.randrange(1, 5)):
            at = generator.randrange(len(data))
            match generator.randrange(3):
                case 0:
                    data[at] = generator.randrange(256)
                case 1:
                    del data[at : at + generator.randrange(1, 9)]
                case _:
                    data[at:at] = generator.randbytes(generator.randrange(1, 9))
            if not data:
                break
        reader = Reader()
        try:
            reader.feed(bytes(data))
            outcomes["other"] += 1
        except ProtocolError:
            outcomes["refused"] += 1
        assert reader.allocated_bytes <= 2**25
    assert outcomes["refused"] > 3_000


def test_noise_gives_protocol_errors_only() -> None:
    generator = random.Random(4)
    for _ in range(1_000):
        data = b"p2\x01" * generator.randrange(2) + generator.randbytes(generator.randrange(1, 99))
        reader = Reader()
        try:
            reader.feed(data)
        except ProtocolError:
            continue
        assert reader.delivered == []


def test_a_stopped_decoder_delivers_nothing_more() -> None:
    reader = Reader()
    reader.on_deliver = reader.decoder.stop
    reader.feed(b"".join(encode(message()) + encode(message(), number=1)))
    assert len(reader.delivered) == 1
    assert not reader.decoder.partial


@pytest.mark.parametrize(
    "buffers",
    [
        [memoryview(bytearray(9))],
        [memoryview(bytes(10))],
        [memoryview(bytearray(10)).cast("b")],
        [],
    ],
    ids=["size", "read-only", "format", "count"],
)
def test_a_receiver_that_opens_wrong_buffers_is_our_bug(buffers: list[memoryview]) -> None:
    decoder = FrameDecoder(lambda lane, header: buffers, lambda lane, item: None)
    data = raw_frame(FIRST | LAST, encode_header("test", {}, [10]), bytes(11))
    decoder.get_buffer()[: len(data)] = data
    with pytest.raises(InternalError):
        decoder.received(len(data))


def test_parts_must_be_flat_bytes() -> None:
    wide = memoryview(bytearray(8)).cast("f")
    strided = memoryview(bytearray(8))[::2]
    for part in (wide, strided):
        with pytest.raises(InternalError):
            OutgoingMessage(Message("test", {}, (part,)), TENSOR)  # type: ignore[arg-type]


def test_part_kinds_travel() -> None:
    reader = Reader()
    item = Message("test", {}, (memoryview(b"x"),), (PartKind.GRADIENT,))
    reader.feed(b"".join(encode(item)))
    assert reader.delivered[0][1].part_kinds == (PartKind.GRADIENT,)
