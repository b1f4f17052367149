"""Buckets hold every element once; the ring sums every chunk once and leaves equal bits."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.model.wire.tensor_layout import WireFormat
from p2ptrain.runtime.allreduce_buckets import (
    MAX_ENTRIES,
    BucketReduction,
    ReducedTensor,
    RingPlace,
    buckets_of,
)

torch.set_num_threads(1)

PICTURE = """
device 0  0    2      1    0
device 1  1    0      2    1
device 2  2    1      0    2
"""
"""As in the module: the chunk that each of 3 devices sends in each step."""


def test_the_picture() -> None:
    for stream in PICTURE.strip().splitlines():
        _, place, *chunks = stream.split()
        ring = RingPlace(int(place), 3)
        assert [str(ring.sent(step)) for step in range(ring.steps)] == chunks


@pytest.mark.parametrize("size", range(2, 9))
def test_what_one_sends_the_next_receives_and_then_sends(size: int) -> None:
    rings = [RingPlace(place, size) for place in range(size)]
    for ring in rings:
        for step in range(ring.steps):
            after = rings[(ring.place + 1) % size]
            assert ring.sent(step) == after.received(step)
            assert step == 0 or ring.sent(step) == ring.received(step - 1)


SUMMANDS = st.lists(
    st.builds(
        lambda number, dtype: (dtype, number),
        st.integers(0, 40),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    ),
    max_size=12,
)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(SUMMANDS, st.integers(1, 100))
def test_every_element_is_in_one_bucket(
    kinds: list[tuple[torch.dtype, int]], bucket_bytes: int
) -> None:
    summands = [ReducedTensor(str(k), dtype, number) for k, (dtype, number) in enumerate(kinds)]
    buckets = buckets_of(summands, lambda *_: bucket_bytes)
    seen: dict[str, list[tuple[int, int]]] = {}
    for index, bucket in enumerate(buckets):
        assert bucket.index == index
        assert bucket.elements <= max(1, bucket_bytes // bucket.dtype.itemsize)
        place = 0
        for entry in bucket.entries:
            assert entry.place == place
            place += entry.elements
            seen.setdefault(entry.name, []).append((entry.first, entry.end))
            assert bucket.dtype == summands[int(entry.name)].dtype
    for summand in summands:
        covered = [k for first, end in seen.get(summand.name, []) for k in range(first, end)]
        assert covered == list(range(summand.elements))


def test_buckets_start_in_the_order_in_which_they_are_filled() -> None:
    summands = [ReducedTensor(name, torch.float32, 3) for name in "abcd"]
    buckets = buckets_of(summands, lambda *_: 24)
    assert [sorted(bucket.names) for bucket in buckets] == [["a", "b"], ["c", "d"]]
    one, two = buckets_of([ReducedTensor("large", torch.float32, 9)], lambda *_: 24)
    assert [(e.first, e.end) for b in (one, two) for e in b.entries] == [(0, 6), (6, 9)]


def test_buckets_are_small_at_the_beginning_and_at_the_end_of_the_backward() -> None:
    mib = 1 << 20
    tensors = [ReducedTensor(str(k), torch.float32, mib // 8) for k in range(24)]  # 12 MiB in all
    sizes = [4 * bucket.elements / mib for bucket in buckets_of(tensors)]
    assert sizes == [1.0, 1.0, 2.0, 4.0, 2.0, 1.0, 1.0]


def test_a_bucket_has_room_for_its_presence_bits() -> None:
    summands = [ReducedTensor(str(k), torch.float32, 1) for k in range(MAX_ENTRIES + 1)]
    assert [len(bucket.entries) for bucket in buckets_of(summands)] == [MAX_ENTRIES, 1]


def _all_reduced(
    parts: list[torch.Tensor], present: list[int], chance: int
) -> list[BucketReduction]:
    """Every device's sum; frames arrive in any order."""
    size, draw = len(parts), random.Random(chance)
    rings = [RingPlace(place, size) for place in range(size)]
    sums = [
        BucketReduction(ring, part.clone(), p)
        for ring, part, p in zip(rings, parts, present, strict=True)
    ]
    due = [(place, 0) for place in range(size)]
    frames = []
    while due or frames:
        if due and (not frames or draw.random() < 0.5):
            place, step = due.pop(draw.randrange(len(due)))
            bits, chunk = sums[place].outgoing(step)
            frames.append(((place + 1) % size, step, bits, chunk.clone()))
            sums[place].sent(step)
        else:
            place, step, bits, values = frames.pop(draw.randrange(len(frames)))
            assert not sums[place].has(step)
            room = sums[place].place(step)
            if room is not None and draw.random() < 0.5:
                values = room.copy_(values)
            following = sums[place].receive(step, bits, values)
            due += [] if following is None else [(place, following)]
    return sums


def test_a_sum_arrives_in_the_bucket_once_its_part_has_left() -> None:
    total = BucketReduction(RingPlace(0, 3), torch.arange(6.0), 1)
    assert total.place(0) is None  # is added
    assert total.place(2) is None  # replaces chunk 0, which has not been sent
    total.outgoing(0)
    total.sent(0)
    room = total.place(2)
    assert room is not None
    room.fill_(7.0)
    total.receive(2, 1, room)
    assert total.flat.tolist() == [7.0, 7.0, 2.0, 3.0, 4.0, 5.0]
    rounded = BucketReduction(RingPlace(0, 3), torch.ones(3000), 1, WireFormat.BF16)
    rounded.sent(0)
    assert rounded.place(2) is None  # arrives as other bytes


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(2, 7), st.integers(0, 20), st.integers(0, 2**20))
def test_every_part_is_summed_once_everywhere(size: int, elements: int, chance: int) -> None:
    # Device d has 8^d in each place: a sum in base 8 shows how often each was added.
    parts = [torch.full((elements,), 8**place, dtype=torch.int64) for place in range(size)]
    sums = _all_reduced(parts, [1 << place for place in range(size)], chance)
    expected = torch.full((elements,), sum(8**place for place in range(size)))
    for total in sums:
        assert total.complete
        assert torch.equal(total.flat, expected)
        assert total.present == (1 << size) - 1


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.integers(2, 7), st.integers(0, 2**20), st.integers(0, 2**20))
def test_all_devices_end_with_the_same_bits(size: int, chance: int, other: int) -> None:
    generator = torch.Generator().manual_seed(chance)
    parts = [torch.randn(23, generator=generator) for _ in range(size)]
    sums = [
        total.flat
        for order in (chance, other)  # nor do bits depend on who was slow
        for total in _all_reduced(parts, [0] * size, order)
    ]
    assert all(torch.equal(flat, sums[0]) for flat in sums)
    torch.testing.assert_close(sums[0], torch.stack(parts).sum(0))
