from __future__ import annotations

import random
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import InternalError, ProtocolError, VersionMismatch
from p2ptrain.net.frame import (
    CHUNK_LIMIT_BYTES,
    PART_LIMIT_BYTES,
    PARTS_LIMIT,
    PREFIX_BYTES,
    FrameFlag,
    Header,
    Prefix,
    decode_header,
    decode_prefix,
    encode_header,
    pack_prefix,
)
from p2ptrain.net.message import HEADER_LIMIT_BYTES, PartKind, Priority

FIRST, LAST = FrameFlag.FIRST, FrameFlag.LAST


@given(
    st.sampled_from(Priority),
    st.booleans(),
    st.booleans(),
    st.integers(1, HEADER_LIMIT_BYTES),
    st.integers(1, CHUNK_LIMIT_BYTES),
    st.integers(0, 2**32 - 1),
)
def test_round_trip(
    lane: Priority, first: bool, last: bool, header_bytes: int, payload_bytes: int, number: int
) -> None:
    flags = (FIRST if first else FrameFlag(0)) | (LAST if last else FrameFlag(0))
    prefix = Prefix(lane, flags, header_bytes if first else 0, payload_bytes, number)
    data = pack_prefix(*prefix)
    assert len(data) == PREFIX_BYTES
    assert decode_prefix(data) == prefix
    assert prefix.last == last


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, 0), (1, 0x33), (3, 5), (3, 255), (4, 4), (4, 128), (5, 1)],
    ids=["magic", "magic", "lane", "lane", "flags", "flags", "reserved"],
)
def test_refuses_a_wrong_byte(at: int, value: int) -> None:
    data = bytearray(pack_prefix(*Prefix(Priority.BULK, FIRST, 5, 10, 0)))
    data[at] = value
    with pytest.raises(ProtocolError):
        decode_prefix(bytes(data))


@pytest.mark.parametrize(
    "prefix",
    [
        Prefix(Priority.BULK, FIRST, HEADER_LIMIT_BYTES + 1, 1, 0),
        Prefix(Priority.BULK, FIRST, 0, 1, 0),
        Prefix(Priority.BULK, LAST, 7, 1, 0),
        Prefix(Priority.BULK, LAST, 0, CHUNK_LIMIT_BYTES + 1, 0),
        Prefix(Priority.BULK, LAST, 0, 2**32 - 1, 0),
        Prefix(Priority.BULK, FrameFlag(0), 0, 0, 0),
    ],
    ids=["header", "no header", "header inside", "payload", "payload", "nothing"],
)
def test_refuses_lengths_before_anything_is_read(prefix: Prefix) -> None:
    """S15: refuses lengths before anything is read."""
    with pytest.raises(ProtocolError):
        decode_prefix(pack_prefix(*prefix))


def test_another_version_says_so() -> None:
    data = bytearray(pack_prefix(*Prefix(Priority.BULK, FIRST, 5, 10, 0)))
    data[2] = 2
    with pytest.raises(VersionMismatch, match="version 2"):
        decode_prefix(bytes(data))
    with pytest.raises(ProtocolError):
        decode_prefix(bytes(data))


kinds = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)
fields = st.dictionaries(
    st.text(max_size=10), st.integers(-5, 5) | st.text(max_size=10), max_size=5
)
parts = st.lists(
    st.tuples(st.integers(0, PART_LIMIT_BYTES), st.sampled_from(PartKind)), max_size=20
)


@given(kinds, fields, parts, st.booleans())
def test_a_header_comes_back(
    kind: str, fields: dict[str, Any], parts: list[tuple[int, PartKind]], with_kinds: bool
) -> None:
    part_bytes = tuple(size for size, _ in parts)
    part_kinds = tuple(part for _, part in parts) if with_kinds else ()
    data = encode_header(kind, fields, part_bytes, part_kinds)
    decoded = decode_header(data)
    assert decoded == Header(kind, fields, part_bytes, part_kinds)
    assert decoded.header_bytes == len(data)


@pytest.mark.parametrize(
    "items",
    [
        {"kind": "a"},
        [],
        ["a", {}, []],
        ["a", {}, [], [], []],
        ["", {}, [], []],
        ["a" * 65, {}, [], []],
        ["a b", {}, [], []],
        ["a\n", {}, [], []],
        ["\x1b[31m", {}, [], []],
        [b"a", {}, [], []],
        [None, {}, [], []],
        ["a", [], [], []],
        ["a", None, [], []],
        ["a", {}, {}, []],
        ["a", {}, [-1], []],
        ["a", {}, [True], []],
        ["a", {}, [1.0], []],
        ["a", {}, [PART_LIMIT_BYTES + 1], []],
        ["a", {}, [2**63], []],
        ["a", {}, [0] * (PARTS_LIMIT + 1), []],
        ["a", {}, [], [0]],
        ["a", {}, [1, 2], [0]],
        ["a", {}, [1], [5]],
        ["a", {}, [1], [-1]],
        ["a", {}, [1], [True]],
        ["a", {}, [1], None],
        ["a", {"x": [[[[[[[1]]]]]]]}, [], []],
    ],
    ids=repr,
)
def test_refuses_what_is_no_header(items: object) -> None:
    with pytest.raises(ProtocolError):
        decode_header(cbor2.dumps(items))


def test_refuses_a_header_beyond_the_limit_unread() -> None:
    with pytest.raises(ProtocolError, match="4097"):
        decode_header(b"\x00" * (HEADER_LIMIT_BYTES + 1))


@pytest.mark.parametrize(
    ("kind", "fields", "sizes", "part_kinds"),
    [
        ("a b", {}, [], []),
        ("a", {"x": "y" * HEADER_LIMIT_BYTES}, [], []),
        ("a", {"x": object()}, [], []),
        ("a", {}, [-1], []),
        ("a", {}, [1], [PartKind.INPUT] * 2),
    ],
)
def test_authors_learn_of_their_mistakes(
    kind: str, fields: dict[str, Any], sizes: list[int], part_kinds: list[PartKind]
) -> None:
    with pytest.raises(InternalError):
        encode_header(kind, fields, sizes, part_kinds)


def test_mutated_headers_give_protocol_errors_only() -> None:
    generator = random.Random(11)
    valid = encode_header("train.forward", {"epoch": 3, "job": "x"}, [10, 20], [PartKind.INPUT] * 2)
    for _ in range(5_000):
        data = bytearray(valid)
        for _ in range(generator.randrange(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            header = decode_header(bytes(data[: generator.randrange(len(data) + 1)]))
        except ProtocolError:
            continue
        assert all(type(size) is int and size >= 0 for size in header.part_bytes)
