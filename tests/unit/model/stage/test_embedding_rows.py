"""An embedding that adds only the rows it has read gives the bits of autograd's own."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from p2ptrain.model.stage.embedding_rows import embedding

WORDS, WIDE = 40, 3


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Zeros' signs too."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@given(
    micro_batches=st.lists(
        st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=WORDS + 5), min_size=1, max_size=4
    ),
    padding_idx=st.integers(-1, WORDS - 1),
    by_frequency=st.booleans(),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    seed=st.integers(0, 1000),
)
def test_gradients_are_autograds(
    micro_batches: list[list[int]],
    padding_idx: int,
    by_frequency: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(WORDS, WIDE, generator=generator)
    ours, theirs = nn.Parameter(table.clone()), nn.Parameter(table.clone())
    for words in micro_batches:
        indices = torch.tensor(words, dtype=dtype)
        gradient = torch.randn(len(words), WIDE, generator=generator)
        gradient[0] = -0.0
        result = embedding(ours, indices, padding_idx, by_frequency)
        expected = torch.ops.aten.embedding.default(theirs, indices, padding_idx, by_frequency)
        assert torch.equal(result, expected)
        result.backward(gradient)  # type: ignore[no-untyped-call]
        expected.backward(gradient)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert same_bits(ours.grad, theirs.grad)
