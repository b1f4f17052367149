"""A model is worked on unit by unit, in little memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import rnn

from p2ptrain.model.capture.capture import capture
from p2ptrain.profiling.measure_units import measure_units, work_on
from tests.support.prepared_models import Get


@pytest.mark.parametrize("name", ["cnn", "bert"])
def test_working_on_needs_no_more_than_a_unit_where_memory_is_short(
    prepared: Get, name: str
) -> None:
    description = prepared(name).model.description
    steps = work_on(description, 2, 1)
    for _ in range(len(description.units) + 1):
        next(steps)


class _Captions(nn.Module):
    """Packs an image and words; the loss packs the words alone, by the same lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(6, 9)
        self.lstm = nn.LSTM(4, 6, batch_first=True)

    def forward(self, image: torch.Tensor, words: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        x = torch.cat([image[:, None], self.words(words)], 1)
        packed = rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        y: torch.Tensor = self.out(self.lstm(packed)[0].data)
        return y


def _of_words(output: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    packed = rnn.pack_padded_sequence(*target, batch_first=True, enforce_sorted=False)
    return cross_entropy(output, packed.data)


@pytest.mark.parametrize("memory_bytes", [None, 1 << 30])
def test_what_model_and_loss_pack_is_made_up_of_one_length(memory_bytes: int | None) -> None:
    words, lengths = torch.ones(4, 5, dtype=torch.int64), torch.tensor([1, 5, 3, 2])
    example = ((torch.randn(4, 4), words, lengths), (words, lengths))
    description = capture(_Captions(), _of_words, example, evaluation=False).description
    measured = measure_units(description, batch_sizes=(2,), memory_bytes=memory_bytes)
    assert measured.times.at(2).forward
