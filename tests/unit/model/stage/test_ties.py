"""Tensors that are used many times, in many stages: sums of gradients in plain torch's order."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy

from p2ptrain.model.stage.cross_stage_gradients import merge
from tests.support.stage_pipeline import assert_same, captured, pipeline_step, plain_step
from tests.support.zoo import Made

WORDS, WIDE, LONG = 11, 8, 5


class _Tangled(nn.Module):
    """Random steps, of which most use a weight or a value that other steps use as well."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        kinds = ("embed", "attend", "shared", "recur", "skip", "own")
        self.steps = [(draw.choice(kinds), draw.random()) for _ in range(9)]
        self.table = nn.Parameter(torch.randn(WORDS, WIDE))
        self.shared = nn.Linear(WIDE, WIDE)
        self.recurrent = nn.GRU(WIDE, WIDE, batch_first=True)
        self.own = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in self.steps)

    def forward(self, words: Tensor) -> Tensor:
        values = [F.embedding(words, self.table)]
        for (kind, where), own in zip(self.steps, self.own, strict=True):
            x = values[-1]
            if kind == "embed":
                x = x.tanh() + F.embedding(words, self.table)
            elif kind == "attend":
                x = x + (x @ self.table.t()).softmax(-1) @ self.table
            elif kind == "shared":
                x = self.shared(self.shared(x).tanh()).tanh()
            elif kind == "recur":
                x = self.recurrent(x)[0]
            elif kind == "skip":
                x = x.sin() + values[int(where * len(values))]
            else:
                x = own(x).tanh()
            values.append(x)
        return (values[-1] @ self.table.t()).flatten(0, 1)


def _loss(output: Tensor, words: Tensor) -> Tensor:
    return cross_entropy(output, words.flatten())


@pytest.mark.parametrize("seed", range(6))
def test_a_tensor_of_many_uses_is_plain_torchs_at_any_cut(seed: int) -> None:
    torch.manual_seed(seed)
    rows = [torch.randint(0, WORDS, (LONG,)) for _ in range(8)]
    made = Made("tangled", _Tangled(seed), [(row, row.flip(0)) for row in rows], _loss)
    model, plain, draw = captured(made), plain_step(made), random.Random(seed)
    units = len(model.description.units)
    for _ in range(8):
        inner = draw.sample(range(1, units), draw.randint(1, min(5, units - 1)))
        how = {"split": draw.random() < 0.4, "ahead": draw.random() < 0.5}
        assert_same(plain, pipeline_step(made, model, sorted({0, *inner, units}), **how))


def test_sums_of_stages_are_added_from_the_last_on() -> None:
    parts = [torch.randn(50) for _ in range(3)]
    merged = merge([parts[0], None, *parts[1:]])
    assert merged is not None
    assert torch.equal(merged, (parts[0] + parts[1]) + parts[2])
    assert merge([None, None]) is None
    assert merge(parts[:1]) is not parts[0]
