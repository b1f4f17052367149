"""Attention whose heads share keys, by transformers: with a mask only where plain torch has one.

Positions that the library numbers by itself are those of `llama` in `test_transformers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.support import stage_pipeline, zoo
from tests.support.stage_pipeline import assert_same
from tests.support.zoo_transformers import llama

_TOKENS = 12


class _Numbered(nn.Module):
    """Six heads to a key; `positions` numbers the tokens."""

    def __init__(self, positions: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.language = llama(num_hidden_layers=1, hidden_size=48, num_attention_heads=6)
        self.register_buffer("halves", torch.arange(_TOKENS)[None] % 6)
        self.positions = positions

    def forward(self, words: Tensor, numbers: Tensor) -> Any:
        return self.language(words, position_ids=self.positions(self, numbers)).logits.flatten(0, 1)


def _counts(model: nn.Module, numbers: Tensor) -> Tensor:
    return torch.arange(_TOKENS)[None].expand(numbers.shape[0], -1) + 1


def _begins_again(model: nn.Module, numbers: Tensor) -> Tensor:
    counted = torch.arange(_TOKENS)[None]
    counted[:, 6:] -= 6
    return counted


@pytest.mark.parametrize(
    "positions",
    [
        _counts,
        _begins_again,
        lambda model, numbers: model.halves,
        lambda model, numbers: numbers,
    ],
    ids=["counted", "written", "kept", "data"],
)
def test_it_trains_to_plain_torchs_bits(
    positions: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _Numbered(positions)
        rows = [(torch.randint(40, (_TOKENS,)), torch.arange(_TOKENS) % 6) for _ in range(8)]
    data = [((words, numbers), words.roll(-1)) for words, numbers in rows]
    made = zoo.Made("numbered", model, data, _next_token)
    captured = stage_pipeline.captured(made)
    units = range(len(captured.description.units) + 1)
    assert_same(
        stage_pipeline.plain_step(made), stage_pipeline.pipeline_step(made, captured, units)
    )


def _next_token(logits: Tensor, words: Tensor) -> Tensor:
    return cross_entropy(logits, words.flatten())
