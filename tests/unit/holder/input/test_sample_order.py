from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.holder.input.sample_order import SampleOrder, StepPosition

orders = st.builds(
    lambda batch_size, more, seed: SampleOrder(batch_size + more, batch_size, seed),
    st.integers(1, 12),
    st.integers(0, 30),
    st.integers(-5, 2**40),
)


def contract(order: SampleOrder, epoch: int, s: int, micro_batch: int) -> list[torch.Tensor]:
    """The contract's own lines."""
    generator = torch.Generator().manual_seed(order.seed + epoch)
    perm = torch.randperm(order.samples, generator=generator)
    batch = perm[s * order.batch_size : (s + 1) * order.batch_size]
    return list(torch.split(batch, micro_batch))


@given(orders, st.integers(0, 60), st.data())
def test_splits_are_the_contracts(order: SampleOrder, step: int, data: st.DataObject) -> None:
    micro_batch = data.draw(st.integers(1, order.batch_size))
    position = order.position(step)
    expected = contract(order, position.epoch, position.step_in_epoch, micro_batch)
    splits = order.splits(step, micro_batch)
    assert [list(split.indices) for split in splits] == [q.tolist() for q in expected]
    assert [split.weight for split in splits] == [len(q) / order.batch_size for q in expected]


@given(orders, st.integers(0, 1000))
def test_a_position_is_its_step(order: SampleOrder, step: int) -> None:
    position = order.position(step)
    assert 0 <= position.step_in_epoch < order.steps_per_epoch
    assert position.epoch * order.steps_per_epoch + position.step_in_epoch == step


@given(orders, st.integers(0, 3))
def test_an_epoch_never_repeats_a_sample(order: SampleOrder, epoch: int) -> None:
    first = epoch * order.steps_per_epoch
    seen = [i for step in range(first, first + order.steps_per_epoch) for i in order.batch(step)]
    assert len(set(seen)) == len(seen) == order.steps_per_epoch * order.batch_size


def test_the_last_incomplete_batch_is_dropped_and_the_next_generation_shuffles_anew() -> None:
    order = SampleOrder(samples=10, batch_size=4, seed=0)
    assert order.position(2) == StepPosition(epoch=1, step_in_epoch=0)
    assert order.batch(0) != order.batch(2)


def test_a_ragged_last_micro_batch_weighs_less() -> None:
    weights = [split.weight for split in SampleOrder(10, 10, 0).splits(0, 4)]
    assert weights == [0.4, 0.4, 0.2]
