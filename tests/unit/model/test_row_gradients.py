"""An embedding that adds only the rows it has read gives the bits of autograd's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from p2ptrain.model.capture import capture
from p2ptrain.model.row_gradients import embedding
from p2ptrain.model.stage import Stage

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


class _Words(nn.Module):
    """With `tied`, the table also makes the output."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(WORDS, WIDE)
        self.mixing = nn.Linear(WIDE, WIDE)
        self.head = nn.Linear(WIDE, WORDS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(functional.silu(self.mixing(self.table(words)))).mean(1)
        return scores


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_adds_to_a_table_as_plain_torch_does(tied: bool, split: bool) -> None:
    model = _Words(tied=tied).train()
    words, targets = torch.randint(WORDS, (6, 4)), torch.randint(WORDS, (6,))
    captured = capture(model, nn.CrossEntropyLoss(), (words[:2], targets[:2]))
    stage = Stage(captured.description, 0, len(captured.description.units), captured.state())
    for key in range(3):
        part = slice(2 * key, 2 * key + 2)
        nn.CrossEntropyLoss()(model(words[part]), targets[part]).backward()
        stage.forward(key, [words[part]], [targets[part]], split=split)
        if split:
            stage.backward_inputs(key)
            stage.backward_weights(key)
        else:
            stage.backward(key)
    expected = dict(model.named_parameters())
    for name, parameter in stage.parameters().items():
        assert torch.equal(parameter.grad, expected[name].grad), name  # type: ignore[arg-type]


def test_a_table_by_itself_has_no_gradient_of_its_own_size_for_each_micro_batch() -> None:
    words = torch.randint(WORDS, (2, 4))
    captured = capture(_Words(tied=False).train(), nn.CrossEntropyLoss(), (words, words[:, 0]))
    stage = Stage(captured.description, 0, len(captured.description.units), captured.state())
    table = stage.parameters()["table.weight"]
    passed: list[Tensor | None] = []
    table.register_hook(passed.append)  # type: ignore[no-untyped-call]
    for key in range(2):
        stage.forward(key, [words], [words[:, 0]])
        stage.backward(key)
    assert [gradient for gradient in passed if gradient is not None] == []
    assert table.grad is not None
    assert bool(table.grad.any())
