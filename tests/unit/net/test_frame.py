from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import ProtocolError, VersionMismatch
from p2ptrain.net.frame import (
    CHUNK_LIMIT_BYTES,
    PREFIX_BYTES,
    FrameFlag,
    Prefix,
    decode_prefix,
    pack_prefix,
)
from p2ptrain.net.message import HEADER_LIMIT_BYTES, Priority

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
