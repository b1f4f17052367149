"""Models whose samples see each other in ways that no operator's name shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.sample_independence.division_probe import SAMPLES, first_mixing_unit
from tests.support import stage_pipeline, zoo
from tests.support.prepared_models import Prepared
from tests.support.reference import stack
from tests.support.zoo import Made


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


class _AlmostAlike(nn.Module):
    """Values almost alike, spread by a BatchNorm: their rounding grows with them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 512), nn.Linear(512, 64)
        self.norm, self.last = nn.BatchNorm1d(64), nn.Linear(64, 4)
        with torch.no_grad():
            self.first.weight.mul_(1e-3)
            self.first.bias.add_(10)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.norm(self.second(self.first(x))))
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


def _found(made: Made, captured: Captured | None = None) -> int | None:
    """The first unit that mixes; minus one is the last."""
    captured = captured or stage_pipeline.captured(made)
    x, y = stack(made.data[:SAMPLES])
    leaves = captured.flatten_input(x), captured.targets((x, y))
    found = first_mixing_unit(captured.description, captured.state(), *leaves)
    if found is None:
        return None
    return -1 if found.unit == len(captured.description.units) - 1 else found.unit


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        *((model, torch.float32) for model in ("mlp", "gpt", "residual", "named_inputs")),
        ("gpt", torch.float64),
    ],
)
def test_models_that_take_each_sample_for_itself_pass(
    prepared: Callable[..., Prepared], model: str, dtype: torch.dtype
) -> None:
    case = prepared(model, dtype)
    assert _found(case.made, case.model) is None


def test_a_mean_over_the_batch_is_found_before_weights_hide_it() -> None:
    assert _found(_made(_Centred(), mse_loss)) is not None


def test_rounding_that_a_norm_makes_large_is_no_mixing() -> None:
    torch.manual_seed(0)
    assert _found(_made(_AlmostAlike(), mse_loss)) is None


def _balanced(output: Tensor, target: Tensor) -> Tensor:
    """As mixtures of experts have it: a small part is made of means over the batch."""
    share = output.float().softmax(1)
    return mse_loss(output, target) + 1e-2 * share.mean(0).square().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_part_of_the_loss_that_looks_across_samples_is_found(dtype: torch.dtype) -> None:
    made = _made(_layers().to(dtype), _balanced)
    data = [(x.to(dtype), y.to(dtype)) for x, y in made.data]
    assert _found(Made("balanced", made.model, data, made.loss)) == -1


@pytest.mark.parametrize("loss", [_sum_loss, _contrastive])
def test_a_loss_that_is_no_mean_over_samples_is_found(loss: Callable[..., Tensor]) -> None:
    assert _found(_made(_layers(), loss)) == -1
    assert _found(_made(_layers(), mse_loss)) is None


def _masked(output: Tensor, target: Tensor) -> Tensor:
    """Over the targets above 2; all are in `_made`'s."""
    counted = target < 2
    return ((output - target).square() * counted).sum() / counted.sum()


def _by_weights(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    errors = (output - target[0]).square().mean(1)
    return (errors * target[1]).sum() / target[1].sum()


def _padded(output: Tensor, target: Tensor) -> Tensor:
    losses = cross_entropy(output, target, reduction="none")
    return (losses * (target != 3)).sum() / (target != 3).sum()


def _of(loss: Callable[..., Tensor], target: Callable[[int], object]) -> Made:
    made = _made(_layers(), loss)
    data = [(x, target(index)) for index, (x, _) in enumerate(made.data)]
    return Made("odd", made.model, data, loss)


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (_masked, lambda _: torch.linspace(0.0, 1.0, 4)),
        (_by_weights, lambda _: (torch.ones(4), torch.tensor(1.0))),
        (_padded, lambda index: torch.tensor(index % 2)),
    ],
)
def test_a_mean_over_what_a_mask_leaves_is_found_where_the_samples_leave_all(
    loss: Callable[..., Tensor], target: Callable[[int], object]
) -> None:
    assert _found(_of(loss, target)) == -1


def test_a_mask_that_the_inputs_make_is_found() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), (x != 5).all(1).float()

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        values, counted = output
        return ((values - target).square().mean(1) * counted).sum() / counted.sum()

    assert _found(_made(Masked(), loss)) is not None


@pytest.mark.parametrize("classes", [1, 4])
def test_values_that_a_loss_does_not_take_show_nothing(classes: int) -> None:
    made = _of(cross_entropy, lambda index: torch.tensor(index % classes))
    made.model[-1] = nn.Linear(8, classes)  # type: ignore[index]
    assert _found(made) is None


def test_trying_leaves_buffers_and_random_numbers_alone() -> None:
    made = zoo.make("cnn")
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    random = torch.get_rng_state()
    _found(made)
    assert all(torch.equal(before[n], t) for n, t in made.model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
