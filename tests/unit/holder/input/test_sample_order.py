from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.holder.input.mini_batches import SampleOrder

orders = st.builds(
    lambda batch_size, more, seed: SampleOrder(batch_size + more, batch_size, seed),
    st.integers(1, 12),
    st.integers(0, 30),
    st.integers(-5, 2**40),
)


@given(orders, st.integers(0, 60))
def test_a_batch_is_the_contracts(order: SampleOrder, step: int) -> None:
    epoch, s = divmod(step, order.samples // order.batch_size)
    generator = torch.Generator().manual_seed(order.seed + epoch)
    perm = torch.randperm(order.samples, generator=generator)
    expected = perm[s * order.batch_size : (s + 1) * order.batch_size]
    assert list(order.batch(step)) == expected.tolist()


@given(orders, st.integers(0, 3))
def test_an_epoch_never_repeats_a_sample(order: SampleOrder, epoch: int) -> None:
    first = epoch * order.steps_per_epoch
    seen = [i for step in range(first, first + order.steps_per_epoch) for i in order.batch(step)]
    assert len(set(seen)) == len(seen) == order.steps_per_epoch * order.batch_size


def test_the_last_incomplete_batch_is_dropped_and_the_next_epoch_shuffles_again() -> None:
    order = SampleOrder(samples=10, batch_size=4, seed=0)
    assert order.steps_per_epoch == 2
    assert order.batch(0) != order.batch(2)
