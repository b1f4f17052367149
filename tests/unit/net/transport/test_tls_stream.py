from __future__ import annotations

import random
import ssl
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.net.transport.tls import client_context, server_context
from p2ptrain.net.transport.tls_stream import RECORD_BYTES, RecordBorders, overhead_bytes
from tests.support.links import Device


def record(length: int) -> bytes:
    return b"\x17\x03\x03" + length.to_bytes(2, "big") + bytes(length)


def expected(lengths: Sequence[int], received: int) -> tuple[int, int]:
    """(in hand, least missing) after so many bytes, by plain counting."""
    for length in lengths:
        whole = 5 + length
        if received < whole:
            if not received:
                return 0, 0
            return received, (5 if received < 5 else whole) - received
        received -= whole
    return 0, 0


@settings(derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 700), max_size=8),
    most=st.sampled_from([1, 3, 7, 64, 5000]),
    seed=st.integers(0, 99),
)
def test_borders_are_followed_however_the_stream_is_cut(
    lengths: list[int], most: int, seed: int
) -> None:
    stream = memoryview(b"".join(map(record, lengths)))
    cuts = random.Random(seed)
    borders, at = RecordBorders(), 0
    while at < len(stream):
        step = cuts.randint(1, most)
        borders.feed(stream[at : at + step])
        at = min(at + step, len(stream))
        assert (borders.in_hand_bytes, borders.missing_bytes) == expected(lengths, at)


def test_a_record_is_missing_as_much_as_its_head_says() -> None:
    borders = RecordBorders()
    borders.feed(memoryview(record(1000)[:105]))
    assert (borders.in_hand_bytes, borders.missing_bytes) == (105, 900)


@pytest.mark.parametrize(
    "content_bytes", [1, 1000, RECORD_BYTES, RECORD_BYTES + 1, 3 * RECORD_BYTES, 100_000]
)
def test_so_much_does_tls_add(
    left_device: Device, right_device: Device, content_bytes: int
) -> None:
    """Who waited for more than will come would wait for ever."""
    to_left, to_right = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialler = client_context(left_device.pem_file, [right_device.certificate_der])
    left = dialler.wrap_bio(to_left, to_right)
    listener = server_context(right_device.pem_file, [left_device.certificate_der])
    right = listener.wrap_bio(to_right, to_left, server_side=True)
    for side in (left, right, left, right):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    to_right.read()
    left.write(bytes(content_bytes))
    assert len(to_right.read()) == content_bytes + overhead_bytes(content_bytes)
