"""Sums of a shared weight's gradients, in plain torch's order."""

from __future__ import annotations

import torch

from p2ptrain.model.stage.cross_stage_gradients import merge


def test_the_order_is_plain_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    early, late = ([torch.randn(50, generator=generator) for _ in range(5)] for _ in range(2))
    weight = torch.zeros(50, requires_grad=True)
    for e, h in zip(early, late, strict=True):
        ((weight * e).sum() + (weight * h).sum()).backward()
    merged = merge([early, late])
    assert merged is not None
    assert weight.grad is not None
    assert torch.equal(merged, weight.grad)
    apart = sum(early[1:], early[0]) + sum(late[1:], late[0])
    assert not torch.equal(apart, weight.grad), "or this test shows nothing"


def test_nothing_is_left_out() -> None:
    one = torch.ones(2)
    assert merge([[None], [None]]) is None
    merged = merge([[None, one], [one, None]])
    assert merged is not None
    assert merged.tolist() == [2.0, 2.0]
    alone = merge([[one]])
    assert alone is not one
