"""What forward() changes where a trace does not look is refused, where anything depends on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.nn.functional import mse_loss

from p2ptrain.errors import CaptureError
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.comparison import Comparison
from tests.support.compared import compared

_BATCHES = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(3)]
_EXAMPLE = _BATCHES[0]


class _Model(nn.Module):
    """A linear layer, then `f(self, x)`."""

    seen: Tensor
    grows: Tensor

    def __init__(self, f: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("grows", torch.ones(8))
        self.mean = torch.zeros(8)
        self.kept = {"mean": torch.zeros(8)}
        self.own = random.Random(0)
        self.drawing = numpy.random.default_rng(0)
        self.older = numpy.random.RandomState(0)
        self.many = [numpy.random.default_rng(0), {"own": (random.Random(0),)}]
        self.noise = torch.Generator().manual_seed(3)
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, self.linear(x))


def _replaces_attribute(model: Any, x: Tensor) -> Tensor:
    model.mean = 0.9 * model.mean + x.detach().mean(0)
    return x - model.mean


def _replaces_item(model: Any, x: Tensor) -> Tensor:
    model.kept["mean"] = 0.9 * model.kept["mean"] + x.detach().mean(0)
    return x - model.kept["mean"]


def _replaces_parameter(model: Any, x: Tensor) -> Tensor:
    model.weight = nn.Parameter(model.weight * 0.9)
    return x * model.weight


def _replaces_buffer(model: Any, x: Tensor) -> Tensor:
    x = x * model.grows
    model.grows = torch.ones(1, 8)
    return x


def _writes_around_torch(model: Any, x: Tensor) -> Tensor:
    model.kept["array"] = model.kept.get("array", 0.0) + 1.0
    return x * model.kept["array"]


def _seeds_what_it_keeps(model: Any, x: Tensor) -> Tensor:
    model.noise.manual_seed(3)
    return x + torch.randn(8, generator=model.noise)


def _slope(row: Tensor) -> Tensor:
    made: Tensor = torch.func.jvp(torch.tanh, (row,), (row,))[1]
    return made


def _seeds(model: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + torch.randn(8)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@torch.autocast("cpu")
def _cast_slope(x: Tensor) -> Tensor:
    return torch.autograd.grad(torch.tanh(x @ x.T).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    ("f", "says"),
    [
        (_replaces_attribute, "its calls change mean"),
        (_replaces_item, "its calls change kept.mean"),
        (_replaces_parameter, "its calls change weight"),
        (_replaces_buffer, "the buffer 'grows' after batch 1 is"),
        (_writes_around_torch, "its calls change"),
        (lambda model, x: x * random.random(), "it draws Python's random numbers"),
        (lambda model, x: x * float(numpy.random.rand()), "it draws NumPy's random numbers"),
        (lambda model, x: x * model.own.random(), "random numbers"),
        (lambda model, x: x * model.drawing.random(), "random numbers"),
        (lambda model, x: x * (1 if model.older.rand() < 0.6 else 2), "random numbers"),
        (lambda model, x: x * model.many[0].random(), "random numbers"),
        (lambda model, x: x * model.many[1]["own"][0].random(), "random numbers"),
        (_seeds, "random numbers that are not torch's or are seeded"),
        (lambda model, x: x + torch.randn(8, generator=_seeded()), "or are seeded"),
        (lambda model, x: x + torch.zeros(8).normal_(generator=_seeded()), "or are seeded"),
        (_seeds_what_it_keeps, "Draw them once"),
    ],
)
def test_what_no_trace_sees_is_refused(f: Callable[[Any, Tensor], Tensor], says: str) -> None:
    model = _Model(f)
    drawn = torch.get_rng_state()
    with pytest.raises(CaptureError, match=says):
        compared(model, mse_loss, _BATCHES)
    assert torch.equal(drawn, torch.get_rng_state())


@pytest.mark.parametrize(
    ("f", "says"),
    [
        (lambda model, x: torch.vmap(torch.func.grad(torch.sum))(x), "outside of torch.vmap"),
        (lambda model, x: torch.vmap(_slope)(x), "outside of torch.vmap"),
        (lambda model, x: _slope(x), "Use torch.autograd.grad"),
        (lambda model, x: _cast_slope(x), "outside of them"),
    ],
)
def test_it_is_refused(f: Callable[[Any, Tensor], Tensor], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        capture(_Model(f), mse_loss, _EXAMPLE)


def test_a_tensor_in_an_attribute_is_written_to_and_put_back() -> None:
    def writes(model: Any, x: Tensor) -> Tensor:
        model.mean.add_(1)
        return x - model.mean

    model = _Model(writes)
    assert compared(model, mse_loss, _BATCHES) == Comparison(3)
    assert not model.mean.any()


def _differentiates(model: Any, x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: torch.tanh(x).sum())(x) * model.weight


def _goes_backward(model: Any, x: Tensor) -> Tensor:
    start = x.detach().requires_grad_()
    torch.tanh(start).sum().backward()
    return start.grad * x


def _goes_backward_together(model: Any, x: Tensor) -> Tensor:
    torch.autograd.backward([torch.tanh(model.weight * x).sum()])
    return x


def _many_at_once(model: Any, x: Tensor) -> Tensor:
    def loss(weight: Tensor) -> Tensor:
        return torch.tanh(weight * x).sum(0)

    made: Tensor = jacobian(loss, model.weight, create_graph=True, vectorize=True)
    return x * made.sum(0)


def _forward_mode(model: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        moved = torch.tanh(model.linear(forward_ad.make_dual(x, torch.ones_like(x))))
        return x + forward_ad.unpack_dual(moved).tangent


@pytest.mark.parametrize(
    ("f", "says"),
    [
        (_differentiates, "Use torch.autograd.grad"),
        (_goes_backward, "calls backward"),
        (_goes_backward_together, "calls backward"),
        (_many_at_once, "Take them one by one"),
        (_forward_mode, "in forward mode"),
    ],
)
def test_a_derivative_that_cannot_be_followed_is_explained(
    f: Callable[[Any, Tensor], Tensor], says: str
) -> None:
    with pytest.raises(CaptureError, match=says):
        capture(_Model(f), mse_loss, _EXAMPLE)


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch.export refuses them")
def test_generators_that_a_model_keeps_are_taken() -> None:
    model = _Model(lambda model, x: x + torch.randn(8, generator=model.kept["noise"]))
    model.kept["noise"] = torch.Generator()  # type: ignore[assignment]
    assert capture(model, mse_loss, _EXAMPLE, evaluation=False).description.units


def _only_remembers(model: Any, x: Tensor) -> Tensor:
    model.mean = x
    model.kept["mean"] = model.mean
    model.grows = torch.ones(1, 8)
    return model.mean * model.grows * model.kept["mean"]


def test_what_is_only_remembered_is_taken() -> None:
    model = _Model(_only_remembers)
    mean, grows = model.mean, model.grows
    assert capture(model, mse_loss, _EXAMPLE, evaluation=False).description.units
    assert model.mean is mean
    assert model.grows is grows
    assert torch.equal(model.kept["mean"], torch.zeros(8))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.LazyLinear(8), "'weight' has no shape yet"),
        (nn.Sequential(nn.Linear(8, 8), nn.Module()), "'1.A' is sparse"),
        (_Model(lambda model, x: torch.sparse.mm(model.kept["mean"], x.T).T), "'kept.mean' is sp"),
        (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta")), "'1.weight' has a shape"),
    ],
)
def test_tensors_that_cannot_travel_are_named(model: nn.Module, says: str) -> None:
    if isinstance(model, nn.Sequential):
        model[1].register_buffer("A", torch.eye(8).to_sparse())
    if isinstance(model, _Model):
        model.kept["mean"] = torch.eye(8).to_sparse()
    with pytest.raises(CaptureError, match=says):
        capture(model, mse_loss, _EXAMPLE)
