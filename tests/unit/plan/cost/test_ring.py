"""A ring all-reduce, beside one that is carried out step by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.plan.types.gradient_sums import ring_bytes, ring_seconds, ring_steps


@given(st.integers(2, 9), st.integers(1, 50))
def test_every_device_has_the_sum_after_as_many_steps_and_has_sent_as_many_bytes(
    devices: int, chunk_bytes: int
) -> None:
    """Chunk c of device d holds the set of devices whose gradients are in it."""
    held = [[{device} for _ in range(devices)] for device in range(devices)]
    sent = [0] * devices
    steps = 0
    for step in range(2 * devices):
        if all(len(chunk) == devices for chunks in held for chunk in chunks):
            break
        moving = [(d, (d - step) % devices) for d in range(devices)]
        arrived = [(d, c, held[d][c]) for d, c in moving]
        for d, c, chunk in arrived:
            held[(d + 1) % devices][c] = held[(d + 1) % devices][c] | chunk
            sent[d] += chunk_bytes
        steps += 1
    assert steps == ring_steps(devices)
    assert sent == pytest.approx([ring_bytes(devices, devices * chunk_bytes)] * devices)


def test_seconds_are_those_of_the_bytes_and_of_the_steps() -> None:
    assert ring_seconds(2, 100, 10.0, 0.5) == 100 / 10 + 2 * 0.5
    assert ring_seconds(4, 100, 10.0) == 15.0
    assert ring_seconds(1, 100, 10.0, 0.5) == 0.0
