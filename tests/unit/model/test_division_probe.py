"""Models whose samples see each other in ways that no operator's name shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

from p2ptrain.model.division_probe import SAMPLES, first_mixing_unit
from tests import zoo
from tests.reference import stack
from tests.unit.model import pipeline
from tests.zoo import Made


class _Centred(nn.Module):
    """Takes the batch's mean away, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        nn.init.zeros_(self.last.weight)  # so that neither output nor loss shows anything

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        output: Tensor = self.last(torch.tanh(hidden - hidden.mean(0, keepdim=True)))
        return output


def _sum_loss(output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(output, target, reduction="sum")


def _contrastive(output: Tensor, target: Tensor) -> Tensor:
    logits = normalize(output, dim=1) @ normalize(target, dim=1).T
    return cross_entropy(logits, torch.arange(output.shape[0]))


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def _made(model: nn.Module, loss: Callable[..., Tensor]) -> Made:
    values = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(3))
    return Made("odd", model, list(zip(values[0], values[1, :, :4], strict=True)), loss)


def _found(made: Made) -> int | None:
    captured = pipeline.captured(made)
    x, y = stack(made.data[:SAMPLES])
    leaves = captured.flatten_input(x), captured.flatten_target(y)
    return first_mixing_unit(captured.description, captured.state(), *leaves)


@pytest.mark.parametrize("model", ["mlp", "gpt", "residual", "named_inputs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_models_that_take_each_sample_for_itself_pass(model: str, dtype: torch.dtype) -> None:
    assert _found(zoo.make(model, dtype=dtype)) is None


def test_a_mean_over_the_batch_is_found_before_weights_hide_it() -> None:
    assert _found(_made(_Centred(), mse_loss)) is not None


@pytest.mark.parametrize("loss", [_sum_loss, _contrastive])
def test_a_loss_that_is_no_mean_over_samples_is_found(loss: Callable[..., Tensor]) -> None:
    made = _made(_layers(), loss)
    units = len(pipeline.captured(made).description.units)
    assert _found(made) == units - 1
    assert _found(_made(_layers(), mse_loss)) is None


def test_trying_leaves_buffers_and_random_numbers_alone() -> None:
    made = zoo.make("cnn")
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    random = torch.get_rng_state()
    _found(made)
    assert all(torch.equal(before[n], t) for n, t in made.model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
