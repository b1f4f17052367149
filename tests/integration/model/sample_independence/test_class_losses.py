"""What losses over classes count, and what tells of masks made by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss, pad

from p2ptrain.job.batch_parts import own_loss
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.graph.nodes import TargetRef
from p2ptrain.model.sample_independence.class_losses import ClassLosses, Leaves, entered
from p2ptrain.model.sample_independence.division_effects import mask_values

TARGETS = torch.tensor([0, -100, 2, 3, 1, 1])


def _losses(
    model: nn.Module, loss: Callable[..., Any], inputs: Any, targets: Any
) -> tuple[ClassLosses, Leaves]:
    captured = capture(model, loss, (inputs, targets), evaluation=False)
    entering = captured.entering(inputs, "train")
    leaves = entered(captured.description, entering, captured.targets((inputs, targets)))
    return ClassLosses(captured.description, captured.state()), leaves


def _all_classes(
    loss: Callable[..., Tensor], output: Tensor, target: Tensor, **options: Any
) -> Tensor:
    return loss(output, target.clamp(min=0), **options)


def _nll(output: Tensor, target: Tensor, **options: Any) -> Tensor:
    return nll_loss(output.log_softmax(1), target, **options)


def _left_out_in_place(output: Tensor, target: Tensor) -> Tensor:
    target = target.clone()
    target.view(-1).masked_fill_(target == 3, -100)
    return cross_entropy(output, target)


@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (cross_entropy, 5),
        (partial(_all_classes, cross_entropy, ignore_index=1), 4),
        (nn.CrossEntropyLoss(label_smoothing=0.1), 5),
        (nn.CrossEntropyLoss(weight=torch.arange(1.0, 6)), 1 + 3 + 4 + 2 + 2),
        (partial(_all_classes, _nll, ignore_index=2), 5),
        (_left_out_in_place, 4),
    ],
)
def test_targets_that_are_not_left_out_are_counted(loss: Callable[..., Any], count: int) -> None:
    losses, leaves = _losses(nn.Linear(3, 5), loss, torch.randn(6, 3), TARGETS)
    assert losses.is_counted
    assert losses.count(leaves) == count


class _Labelled(nn.Module):
    """Takes its labels as an input, shifted by one, as causal language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 9)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and logits."""
        logits = self.table(tokens)
        shifted = pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return cross_entropy(logits.view(-1, 9), shifted.view(-1)), logits


def test_labels_among_the_inputs_are_counted_as_the_model_shifts_them() -> None:
    tokens = torch.randint(0, 9, (4, 5))
    labels = tokens.index_fill(1, torch.tensor([0, 2]), -100)
    losses, leaves = _losses(_Labelled(), own_loss, {"tokens": tokens, "labels": labels}, None)
    assert losses.count(leaves) == 4 * 3
    assert losses.leave_out(leaves), "of the last token nothing is predicted"
    assert losses.ignored() == {TargetRef(0): [-100]}


def test_two_means_have_no_common_count() -> None:
    def both(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target) + cross_entropy(output[:3], target[:3], ignore_index=2)

    losses, leaves = _losses(nn.Linear(3, 5), both, torch.randn(6, 3), TARGETS)
    assert not losses.is_counted
    assert losses.leaves_out_a_class
    assert losses.leave_out(leaves)


def test_what_follows_from_parameters_is_not_counted() -> None:
    class Guessed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scores = super().forward(x)
            return cross_entropy(scores, scores.argmax(1))

    losses, _ = _losses(Guessed(3, 5), own_loss, {"x": torch.randn(6, 3)}, None)
    assert not losses.is_counted


def test_what_targets_and_inputs_are_compared_with_tells() -> None:
    class Padded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (x[:, :1] != 7)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output.squeeze(1) * (target.view(-1) >= 2)).mean()

    example = torch.randn(4, 3), torch.arange(4)
    found = mask_values(capture(Padded(3, 1), loss, example, evaluation=False).description)
    assert found == {TargetRef(1): [7], TargetRef(0): [1, 2, 3]}


def test_losses_of_models_that_differentiate_are_known() -> None:
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scores = super().forward(x)
            (slope,) = torch.autograd.grad(scores.square().sum(), self.weight, create_graph=True)
            return scores * slope.mean()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, torch.arange(1.0, 5), ignore_index=2)

    losses, leaves = _losses(Adapted(3, 4), loss, torch.randn(4, 3), torch.arange(4))
    assert losses.weighs_classes
    assert losses.leaves_out_a_class
    assert losses.count(leaves) == 1 + 2 + 4
