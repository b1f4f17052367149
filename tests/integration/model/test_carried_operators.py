"""Mathematics that models use now and then: carried to devices, with the bits of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Cauchy, LogNormal
from torch.nn.functional import mse_loss

from p2ptrain.model.capture.capture import capture
from p2ptrain.model.graph.effects import draws_random_numbers
from p2ptrain.model.stage.stage import Stage
from tests.support.odd_models import AfterLinear

_EXAMPLE = torch.randn(4, 8), torch.randn(4, 8)


def _square(x: Tensor) -> Tensor:
    return x.unflatten(1, (2, 4)).mT @ x.unflatten(1, (2, 4)) + torch.eye(4)


def _solved(x: Tensor) -> Tensor:
    factors, pivots = torch.linalg.lu_factor(_square(x))
    return x + torch.linalg.lu_solve(factors, pivots, x.unflatten(1, (4, 2))).flatten(1)


def _segments(x: Tensor) -> Tensor:
    lengths = torch.tensor([3, 5])
    return (
        x + torch.segment_reduce(x.T.contiguous(), "mean", lengths=lengths, axis=0).sum(0)[:, None]
    )


def _tensors(x: Tensor) -> Tensor:
    scale, zero = torch.tensor([0.1]), torch.tensor([1], dtype=torch.int32)
    return torch.fake_quantize_per_tensor_affine(x, scale, zero, -8, 7)


def _channels(x: Tensor) -> Tensor:
    scale, zero = torch.linspace(0.05, 0.1, 8), torch.zeros(8, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(x, scale, zero, 1, -8, 7)


def _reflected(x: Tensor) -> Tensor:
    """What torch.nn.utils.parametrizations.orthogonal computes of a weight."""
    reflectors = _square(x).tril(-1)
    scales = 2.0 / (1.0 + reflectors.square().sum(-2))
    return x + torch.linalg.householder_product(reflectors, scales).sum(-1).repeat(1, 2)


def _rotated(x: Tensor) -> Tensor:
    reflectors, scales = torch.eye(8) + torch.ones(8, 8).tril(-1), torch.full((8,), 0.1)
    return torch.ormqr(reflectors, scales, x.T).T


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "matrix_power": lambda x: x + torch.linalg.matrix_power(_square(x), 3).sum(-1).repeat(1, 2),
    "lu_factor": _solved,
    "lu": lambda x: x + torch.linalg.lu(_square(x))[2].sum(-1).repeat(1, 2),
    "eigvals": lambda x: x + torch.linalg.eigvals(_square(x.detach())).real.repeat(1, 2),
    "eig": lambda x: x + torch.linalg.eig(_square(x)).eigenvalues.real.repeat(1, 2),
    "svd": lambda x: x + torch.svd(_square(x))[1].repeat(1, 2),
    "pinverse": lambda x: x + torch.pinverse(x.unflatten(1, (2, 4))).flatten(1),
    "householder_product": _reflected,
    "ldl_factor": lambda x: (
        x + torch.linalg.ldl_factor(_square(x.detach())).LD.sum(-1).repeat(1, 2)
    ),
    "ormqr": _rotated,
    "triangular_solve": lambda x: (
        x + torch.triangular_solve(x.unflatten(1, (4, 2)), _square(x))[0].flatten(1)
    ),
    "trapz": lambda x: x + torch.trapz(x)[:, None],
    "ger": lambda x: x + torch.ger(x[0], x[0]).sum(0),
    "row_stack": lambda x: torch.row_stack([x[:, :4].T, x[:, 4:].T]).T,
    "frexp": lambda x: x + torch.frexp(x).mantissa,
    "hfft2": lambda x: x + torch.fft.hfft2(x.unflatten(1, (2, 4)))[:, :, :4].flatten(1),
    "kaiser_window": lambda x: x * torch.kaiser_window(8),
    "segment_reduce": _segments,
    "gammainc": lambda x: x + torch.special.gammainc(torch.ones(8), x.abs()),
    "chebyshev": lambda x: x + torch.special.chebyshev_polynomial_t(x.detach(), 3),
    "bessel": lambda x: x + torch.special.modified_bessel_i0(x.detach()),
    "zeta": lambda x: x + torch.special.zeta(x.detach().abs() + 2, 1.0),
    "fake_quantize": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7),
    "fake_quantize_tensors": _tensors,
    "fake_quantize_channels": _channels,
}


class _All(nn.Module):
    """Each function after a linear layer of its own, side by side: they are captured at once."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: AfterLinear(f) for name, f in _FUNCTIONS.items()})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts.values()], 1)


def _losses(output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(output, target[:, None].expand_as(output))


def test_they_compute_and_learn_as_in_plain_torch() -> None:
    model = _All()
    captured = capture(model, _losses, _EXAMPLE, evaluation=False)
    units = len(captured.description.units)
    stage = Stage(captured.description, 0, units, captured.state())
    (loss,) = stage.forward(0, [_EXAMPLE[0]], [_EXAMPLE[1]])
    stage.backward(0)
    expected = _losses(model(_EXAMPLE[0]), _EXAMPLE[1])
    expected.backward()  # type: ignore[no-untyped-call]
    found = stage.parameters()
    gradients = {n: (found[n].grad, p.grad) for n, p in model.named_parameters()}
    wrong = [n for n, (ours, own) in gradients.items() if not torch.equal(ours, own)]
    assert wrong == []
    assert torch.equal(loss, expected)


class _Pooled(nn.Module):
    """Draws its windows again for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.pool = nn.Linear(8, 49), nn.FractionalMaxPool2d(2, output_size=3)
        self.out = nn.Linear(9, 8)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pool(self.linear(x).unflatten(1, (1, 7, 7)))
        return cast("Tensor", self.out(pooled.flatten(1)))


@pytest.mark.parametrize(
    "model",
    [
        AfterLinear(lambda x: x + Cauchy(x, 1.0).rsample().clamp(-1, 1)),
        AfterLinear(lambda x: x + LogNormal(x, 0.1).rsample()),
        AfterLinear(lambda x: x + torch.empty_like(x).log_normal_()),
        _Pooled(),
    ],
)
def test_what_it_draws_follows_from_the_seed(model: nn.Module) -> None:
    captured = capture(model, mse_loss, _EXAMPLE, evaluation=False)
    assert any(draws_random_numbers(node) for node in captured.description.train.nodes)
    units = len(captured.description.units)
    stage = Stage(captured.description, 0, units, captured.state())
    inputs, targets = [_EXAMPLE[0]], [_EXAMPLE[1]]
    one, same, other = (
        stage.forward(key, inputs, targets, seed=(1, 2, seed))[0]
        for key, seed in enumerate((5, 5, 6))
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
