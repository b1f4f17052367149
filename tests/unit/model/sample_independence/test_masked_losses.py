"""Which targets a loss leaves out, and what tells."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from p2ptrain.model.capture.capture import capture
from p2ptrain.model.graph.nodes import InputRef, TargetRef
from p2ptrain.model.sample_independence.masked_losses import (
    DefaultIgnored,
    leaves_out_a_class,
    mask_values,
    weighs_classes,
)


class _Labelled(nn.Module):
    """Takes its labels as an input, shifted by one, as causal language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 9)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        shifted = pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return cross_entropy(self.table(tokens).view(-1, 9), shifted.view(-1))


def _own_loss(output: Tensor, target: Tensor) -> Tensor:
    return output


def test_labels_among_the_inputs_are_looked_at() -> None:
    tokens, nothing = torch.randint(0, 9, (4, 5)), torch.zeros(4)
    example = {"tokens": tokens, "labels": tokens}, nothing
    looks = DefaultIgnored(capture(_Labelled(), _own_loss, example, evaluation=False).description)
    masked = tokens.index_fill(1, torch.tensor([2]), -100)
    assert not looks.found_in([tokens, tokens], [nothing])
    assert looks.found_in([tokens, masked], [nothing])
    assert not looks.found_in([masked, tokens], [nothing]), "these are no labels"


def test_what_targets_and_inputs_are_compared_with_tells() -> None:
    class Padded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (x[:, :1] != 7)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output.squeeze(1) * (target.view(-1) >= 2)).mean()

    example = torch.randn(4, 3), torch.arange(4)
    found = mask_values(capture(Padded(3, 1), loss, example, evaluation=False).description)
    assert found == {InputRef(0): [7], TargetRef(0): [1, 2, 3]}


def test_losses_of_models_that_differentiate_are_known() -> None:
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scores = super().forward(x)
            (slope,) = torch.autograd.grad(scores.square().sum(), self.weight, create_graph=True)
            return scores * slope.mean()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, torch.arange(1.0, 5), ignore_index=2)

    example = torch.randn(4, 3), torch.arange(4)
    nodes = capture(Adapted(3, 4), loss, example, evaluation=False).description.train
    assert any(map(weighs_classes, nodes.nodes))
    assert any(map(leaves_out_a_class, nodes.nodes))
