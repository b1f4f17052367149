"""Seeds by place in the job, and the generator put back."""

from __future__ import annotations

import pytest
import torch

from p2ptrain.model.stage.random_operators import derived_seed, randomness_lock, seeded


def test_every_number_counts() -> None:
    seeds = {
        derived_seed(seed, node)
        for seed in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 11, 1), (11, 1, 1))
        for node in (0, 1)
    }
    assert len(seeds) == 14
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_seed_is_a_stable_function() -> None:
    assert derived_seed((0, 0, 0), 0) == 2314970087912950595


def _draw_and_fail(drawn: list[torch.Tensor]) -> None:
    with seeded((1, 2, 3), 4):
        drawn.append(torch.rand(3))
        raise RuntimeError


def test_the_generator_is_restored_also_after_an_error() -> None:
    before = torch.get_rng_state()
    drawn: list[torch.Tensor] = []
    with seeded((1, 2, 3), 4):
        first = torch.rand(3)
        assert randomness_lock.locked()
    with pytest.raises(RuntimeError):
        _draw_and_fail(drawn)
    assert torch.equal(first, drawn[0])
    assert torch.equal(torch.get_rng_state(), before)
    assert not randomness_lock.locked()
