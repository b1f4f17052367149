"""What a model gives in evaluation mode need not be what it gives in training."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree

from p2ptrain.errors import CaptureError
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.capture.scored_module import Foreign
from p2ptrain.model.stage.stage import Stage

_EXAMPLE = torch.randn(4, 8), torch.tensor([0, 3, 1, 2])


class _Two(nn.Module):
    """Logits in training; what `evaluated` makes of them in evaluation mode."""

    def __init__(self, evaluated: Callable[[Tensor], Any], trained: Any = lambda x: x) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.evaluated, self.trained = evaluated, trained

    def forward(self, x: Tensor) -> Any:
        x = self.head(torch.relu(self.body(x)))
        return self.trained(x) if self.training else self.evaluated(x)


def _evaluated(captured: Captured) -> list[Tensor]:
    """What the evaluation graph gives for the example: the loss, then the output's leaves."""
    units = len(captured.description.units)
    stage = Stage(captured.description, 0, units, captured.state())
    return stage.evaluate([_EXAMPLE[0]], [_EXAMPLE[1]])


def _all_heads(output: Any, target: Tensor) -> Tensor:
    return cross_entropy(output[0], target) + 0.3 * cross_entropy(output[1], target)


def test_auxiliary_heads_in_training_only_leave_evaluation_without_a_loss() -> None:
    model = _Two(lambda x: x, lambda x: (x, x * 2))
    captured = capture(model, _all_heads, _EXAMPLE)
    assert __file__ in captured.unscored
    assert "cross_entropy(output[0], target)" in captured.unscored
    zero, output = _evaluated(captured)
    assert zero == 0
    assert torch.equal(output, model.eval()(_EXAMPLE[0]))


def test_a_loss_of_another_shape_in_evaluation_mode_is_left_out_too() -> None:
    def loss(output: Any, target: Tensor) -> Tensor:
        return output.sum(-1) if output.shape[1] == 2 else cross_entropy(output, target)

    captured = capture(_Two(lambda x: x[:, :2]), loss, _EXAMPLE)
    assert "shape ['batch']" in captured.unscored


def test_a_loss_that_takes_both_outputs_is_computed_in_evaluation() -> None:
    def loss(output: Any, target: Tensor) -> Tensor:
        return cross_entropy(output[0] if isinstance(output, tuple) else output, target)

    model = _Two(lambda x: x, lambda x: (x, x * 2))
    captured = capture(model, loss, _EXAMPLE)
    assert captured.unscored == ""
    assert torch.equal(_evaluated(captured)[0], loss(model.eval()(_EXAMPLE[0]), _EXAMPLE[1]))


def test_a_loss_that_needs_many_samples_is_computed_in_evaluation_too() -> None:
    """It fails with the few that a model is exported with, in both modes alike."""

    def hardest(output: Any, target: Tensor) -> Tensor:
        return cross_entropy(output, target, reduction="none").topk(8).values.mean()

    example = torch.randn(16, 8), torch.randint(4, (16,))
    captured = capture(_Two(lambda x: x), hardest, example)
    assert captured.unscored == ""
    assert captured.evaluates.least == 8


def _anything(output: Any, target: Tensor) -> Tensor:
    leaf: Tensor = pytree.tree_leaves(output)[0]
    return leaf.sum()


def _decides(x: Tensor) -> Tensor:
    return x + 1 if x.sum().item() > 0 else x


def _chosen(x: Tensor) -> Tensor:
    return x[x.sum(1) > 0]


def _uncarried(x: Tensor) -> Tensor:
    return torch.ops.aten.resize.default(x, [x.shape[0], 4])


@pytest.mark.parametrize("evaluated", [_decides, _chosen, _uncarried])
def test_what_fails_in_evaluation_alone_says_so(evaluated: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"^in evaluation mode, for eval_data: "):
        capture(_Two(evaluated), _anything, _EXAMPLE)


class _Colour(enum.Enum):
    RED = 1


def test_what_is_no_tensor_stays_as_it_is_in_the_output() -> None:
    others = (None, 3, 0.5, 2j, "name", b"bytes", _Colour.RED, torch.float16, torch.device("cpu"))
    captured = capture(_Two(lambda x: (x, *others)), _anything, _EXAMPLE)
    output = captured.unflatten_output(_evaluated(captured)[1:])
    assert output[1:] == others
    assert captured.foreign_output == ()


class DynamicCache:
    """As libraries give it along."""


@dataclass
class _Answer:
    logits: Tensor
    words: list[str]


def test_a_dataclass_that_torch_export_knows_is_taken_apart() -> None:
    torch.export.register_dataclass(_Answer)
    captured = capture(_Two(lambda x: _Answer(x, ["a"])), _anything, _EXAMPLE)
    assert captured.foreign_output == ()
    _, logits = _evaluated(captured)
    assert captured.unflatten_output([logits]) == _Answer(logits, ["a"])


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda x: SimpleNamespace(logits=x), "a SimpleNamespace"),
        (lambda x: torch.distributions.Normal(x, 1.0), "a Normal"),
        (lambda x: x.shape[0], "a number that follows from the batch size"),
        (lambda x: DynamicCache(), None),
    ],
)
def test_what_metrics_cannot_be_given_is_named(made: Callable[[Tensor], Any], told: str) -> None:
    captured = capture(_Two(lambda x: {"x": x, "y": made(x)}), _anything, _EXAMPLE)
    assert captured.foreign_output == (() if told is None else (Foreign(told),))
