"""A stage with an embedding adds to its table as plain torch does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from p2ptrain.model.capture.capture import capture
from p2ptrain.model.stage.stage import Stage

WORDS, WIDE = 40, 3


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
    captured = capture(model, nn.CrossEntropyLoss(), (words[:2], targets[:2]), evaluation=False)
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
    model, example = _Words(tied=False).train(), (words, words[:, 0])
    captured = capture(model, nn.CrossEntropyLoss(), example, evaluation=False)
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
