"""Leaves of a model's input that one of its graphs, or both, do not use: they never travel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, pad

from p2ptrain.errors import ScriptError
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.sample_independence.class_losses import ClassLosses, entered
from p2ptrain.model.sample_independence.division_probe import SAMPLES, first_mixing_unit
from p2ptrain.model.stage.stage import Stage
from p2ptrain.profiling.measure_units import measure_units


class OneByMode(nn.Module):
    """Reads `x` always, `label` in training only, `bias` in evaluation only, `unused` never."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, unused: Tensor, bias: Tensor, x: Tensor, label: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output - nn.functional.one_hot(label, 3) if self.training else output + bias


class NoneAtAll(nn.Module):
    """Of its input only the number of samples counts."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 4))
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(self.start.expand(x.shape[0], 4))
        return output


def batch(size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    label = torch.arange(size) % 3
    return (torch.randn(size, 7), torch.randn(size, 3), torch.randn(size, 5), label), label


def test_each_graph_takes_the_leaves_that_it_uses() -> None:
    inputs, label = batch(4)
    model = capture(OneByMode(), cross_entropy, (inputs, label))
    for mode in ("train", "eval"):
        (entering,) = model.entering(inputs, mode)
        assert entering is inputs[2]
    sent = [label, inputs[1], inputs[3]]  # to the last unit: the loss's, and what is near it
    assert all(
        one is other for one, other in zip(model.targets((inputs, label)), sent, strict=True)
    )
    last = len(model.description.units) - 1
    assert model.description.target_uses(last, last + 1, "train") == (0, 2)
    assert model.description.target_uses(last, last + 1, "eval") == (0, 1)
    with pytest.raises(ScriptError, match="must be built like the first one"):
        model.entering(inputs[:2], "train")


def test_what_nothing_uses_is_not_counted_among_what_the_holder_sends() -> None:
    model = capture(OneByMode(), cross_entropy, batch(4))
    measured = measure_units(model.description, batch_sizes=[4], budget_seconds=0.0)
    assert (measured.input_bytes, measured.target_bytes) == (5 * 4, 8 + 3 * 4 + 8)


def test_a_model_that_uses_none_of_its_inputs_learns_the_batch_size_from_the_first() -> None:
    x, label = torch.randn(4, 5), torch.arange(4) % 3
    module = NoneAtAll()
    model = capture(module, cross_entropy, (x, label))
    for mode in ("train", "eval"):
        assert [value.name for value in model.description.crossing(0, mode)] == ["input_0"]
    stage = Stage(model.description, 0, len(model.description.units), model.state())
    for size in (4, 3):
        entering = model.entering(x[:size], "eval")
        _, output = stage.evaluate(entering, [label[:size]])
        assert torch.equal(output, module(x[:size]))


class Masked(nn.Module):
    """Leaves out samples by what stands in the second leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, unused: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), (x != 5).all(1).float()


def by_mask(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    values, counted = output
    return ((values - target).square().mean(1) * counted).sum() / counted.sum()


class Plain(Masked):
    """Leaves nothing out."""

    def forward(self, unused: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x


def of_the_first(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return mse_loss(output[0], target)


@pytest.mark.parametrize(
    ("model", "loss", "mixes"), [(Masked, by_mask, True), (Plain, of_the_first, False)]
)
def test_samples_are_tried_whatever_stands_before_what_is_used(
    model: Callable[[], nn.Module], loss: Callable[..., Tensor], mixes: bool
) -> None:
    inputs, target = (torch.zeros(SAMPLES, 2), torch.randn(SAMPLES, 6)), torch.randn(SAMPLES, 4)
    captured: Captured = capture(model(), loss, (inputs, target), evaluation=False)
    leaves = captured.entering(inputs, "train"), captured.targets((inputs, target))
    found = first_mixing_unit(captured.description, captured.state(), *leaves)
    assert (found is not None) is mixes


def test_labels_behind_an_unused_input_are_looked_at() -> None:
    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 9)

        def forward(self, kinds: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
            shifted = pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
            return cross_entropy(self.table(tokens).view(-1, 9), shifted.view(-1))

    tokens, nothing = torch.randint(0, 9, (4, 5)), torch.zeros(4)
    masked = tokens.index_fill(1, torch.tensor([2]), -100)
    example = (tokens, tokens, tokens), nothing
    model = capture(Labelled(), lambda output, _: output, example, evaluation=False)
    losses = ClassLosses(model.description, model.state())
    for inputs, count in (((masked, tokens, tokens), 16), ((tokens, tokens, masked), 12)):
        targets = model.targets((inputs, nothing))
        leaves = entered(model.description, model.entering(inputs, "train"), targets)
        assert losses.count(leaves) == count
