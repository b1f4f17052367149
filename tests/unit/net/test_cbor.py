from __future__ import annotations

import enum
import random
import tracemalloc
from contextlib import suppress
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import InternalError, ProtocolError
from p2ptrain.net import cbor

LIMIT = 1 << 20

leaves = (
    st.none()
    | st.booleans()
    | st.integers(cbor.INTEGER_MIN, cbor.INTEGER_MAX)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


def refused(data: bytes, limit_bytes: int = LIMIT, depth_limit: int = 32) -> bool:
    try:
        cbor.loads(data, limit_bytes, depth_limit)
    except ProtocolError:
        return True
    return False


@given(values)
def test_round_trip(value: Any) -> None:
    assert cbor.loads(cbor.dumps(value), LIMIT) == value


def test_floats_that_are_not_finite_pass_for_their_reader_to_check() -> None:
    nan, infinite = cbor.loads(cbor.dumps([float("nan"), float("inf")]), LIMIT)
    assert nan != nan
    assert infinite == float("inf")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01\x01",  # trailing byte
        b"\xf7",  # undefined
        b"\xf0",  # simple value 16
        b"\xf8\xff",  # simple value 255
        b"\xff",  # break
        b"\x9f\x01\xff",  # indefinite list
        b"\xbf\x61a\x01\xff",  # indefinite map
        b"\x7f\x61a\xff",  # indefinite text
        b"\x5f\x41a\xff",  # indefinite bytes
        b"\xa2\x61a\x01\x61a\x02",  # duplicate key
        b"\xa1\x01\x02",  # integer key
        b"\xa1\x41a\x02",  # byte key
        b"\xa1\xf6\x02",  # null key
        b"\xa1\x80\x02",  # list key
        b"\x61\xff",  # text that is not UTF-8
        b"\x3b" + b"\xff" * 8,  # below int64
        b"\x9b" + b"\xff" * 8,  # 2^64 - 1 items
        b"\x9a\xff\xff\xff\xff",
        b"\xbb" + b"\xff" * 8,
        b"\x5b" + b"\xff" * 8,  # 2^64 - 1 bytes
        b"\x7b\x7f" + b"\xff" * 7,
        b"\x81",
        b"\x62a",
        b"\x1c",  # reserved additional information
        b"\x81" * 401 + b"\x01",
        b"\x81" * 1_000_000,
        b"\xa1\x61a" * 9_000,
    ],
    ids=lambda data: data[:6].hex(),
)
def test_refuses_what_is_not_strict(data: bytes) -> None:
    """S13: refuses what is not strict."""
    assert refused(data)


def test_refuses_every_tag() -> None:
    """S13: refuses every tag."""
    tags = (*range(4096), *range(4096, 65536, 61))
    assert [tag for tag in tags if not refused(b"\xd9" + tag.to_bytes(2) + b"\x01")] == []


@pytest.mark.parametrize("content", [b"\x01", b"\x41\x01", b"\x80", b"\x61a", b"\xa0"])
def test_refuses_builtin_tags_around_any_type(content: bytes) -> None:
    tags = [*range(40), 100, 256, 258, 260, 261, 1004, 43000, 55799]
    assert [tag for tag in tags if not refused(b"\xd9" + tag.to_bytes(2) + content)] == []
    assert [tag for tag in tags if not refused(b"\x81\xda" + tag.to_bytes(4) + content)] == []


def test_depth_is_counted_on_both_sides() -> None:
    """S13: depth is counted on both sides."""
    nested: Any = 1
    for _ in range(8):
        nested = [nested]
    assert cbor.loads(cbor.dumps(nested, 8), LIMIT, 8) == nested
    assert refused(cbor2.dumps([nested]), depth_limit=8)
    with pytest.raises(InternalError):
        cbor.dumps([nested], 8)


def test_size_is_checked_first() -> None:
    """S13: size is checked first."""
    data = cbor.dumps(b"x" * 100)
    assert cbor.loads(data, len(data)) == b"x" * 100
    assert refused(data, len(data) - 1)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, {1: 2}, {b"a": 1}, object(), {1, 2}, 1j])
def test_will_not_encode_what_it_would_refuse(value: object) -> None:
    with pytest.raises(InternalError):
        cbor.dumps([value])


def test_enumerations_travel_as_their_values() -> None:
    class Colour(enum.StrEnum):
        RED = "red"

    class Level(enum.IntEnum):
        HIGH = 3

    assert cbor.loads(cbor.dumps([Colour.RED, Level.HIGH]), LIMIT) == ["red", 3]


def test_noise_gives_protocol_errors_only() -> None:
    generator = random.Random(5)
    for _ in range(5_000):
        refused(generator.randbytes(generator.randrange(64)))


@given(values)
def test_a_value_has_as_many_items_as_are_within_it(value: Any) -> None:
    def count(item: Any) -> int:
        if isinstance(item, dict):
            return 1 + len(item) + sum(map(count, item.values()))
        return 1 + sum(map(count, item)) if isinstance(item, list) else 1

    data, most = cbor.dumps(value), count(value)
    assert cbor.loads(data, LIMIT, items_limit=most) == value
    if len(data) >= most > 1:
        with pytest.raises(ProtocolError, match="items"):
            cbor.loads(data, LIMIT, items_limit=most - 1)


@pytest.mark.parametrize(
    "item", [b"\x80", b"\xa0", b"\x60", b"\x40", b"\x00", b"\x81", b"\xf9\x00\x00"]
)
def test_s13_millions_of_small_items_are_refused_before_any_of_them_is_made(item: bytes) -> None:
    """S13: sixteen megabytes of items; made, they would take a gigabyte."""
    count = (16 << 20) // len(item)
    data = b"\x9a" + count.to_bytes(4, "big") + item * count
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="items"):
            cbor.loads(data, len(data))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 16


@given(st.binary(max_size=60), st.integers(1, 8))
def test_s13_any_bytes_are_read_or_refused_whatever_the_limit_of_items(
    data: bytes, items: int
) -> None:
    with suppress(ProtocolError):
        cbor.loads(data, LIMIT, items_limit=items)
