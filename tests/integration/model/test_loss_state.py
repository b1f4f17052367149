"""What a loss keeps follows the training, or is refused, wherever it is kept."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from p2ptrain.errors import CaptureError
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.stage.stage import Stage
from tests.support.compared import compared

Loss = Callable[[Tensor, Tensor], Tensor]

_BATCHES = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(3)]
_calls = 0


class _Centred(nn.Module):
    """DINO's: the centre is a buffer that is assigned."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 8))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        value = mse_loss(output - self.center, target)
        with torch.no_grad():
            self.center = self.center * 0.9 + output.mean(0, keepdim=True) * 0.1
        return value

    def method(self, output: Tensor, target: Tensor) -> Tensor:
        result: Tensor = self(output, target)
        return result


_centred = _Centred()


def _with_global(output: Tensor, target: Tensor) -> Tensor:
    result: Tensor = _centred(output, target)
    return result


def _with_closure() -> Loss:
    inside = _Centred()
    return lambda output, target: inside(output, target)


def _losses(
    model: nn.Module, run: Callable[[Tensor, Tensor], float], parameters: Any
) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found = []
    for x, y in _BATCHES:
        found.append(run(x, y))
        optimizer.step()
        optimizer.zero_grad()
    return found


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def _plain(loss: Loss) -> list[float]:
    model = _model()

    def run(x: Tensor, y: Tensor) -> float:
        value = loss(model(x), y)
        value.backward()  # type: ignore[no-untyped-call]
        return value.item()

    return _losses(model, run, model.parameters())


def _captured(loss: Loss) -> list[float]:
    model = _model()
    captured = capture(model, loss, _BATCHES[0], evaluation=False)
    stage = Stage(captured.description, 0, len(captured.description.units), captured.state())

    def run(x: Tensor, y: Tensor) -> float:
        (value,) = stage.forward(0, [x], [y])
        stage.backward(0)
        return value.item()

    return _losses(model, run, stage.parameters().values())


@pytest.mark.parametrize(
    "make",
    [
        _Centred,
        _with_closure,
        lambda: _with_global,
        lambda: _Centred().method,
        lambda: functools.partial(_Centred()),
    ],
)
def test_a_buffer_that_the_loss_assigns_follows(make: Callable[[], Loss]) -> None:
    loss = make()
    found = _captured(loss)
    expected = _plain(loss)  # the same object: the capture has left it as it was
    _centred.center.zero_()
    assert found == expected


def _counting_in_place() -> Loss:
    n = torch.zeros(())
    return lambda output, target: mse_loss(output, target) * n.add_(1).clone()


def test_a_tensor_that_a_closure_writes_in_place_follows() -> None:
    found = _captured(_counting_in_place())
    assert found == _plain(_counting_in_place())


def test_a_tensor_in_a_tuple_is_left_as_it_was() -> None:
    kept = (torch.zeros(()),)
    _captured(lambda output, target: mse_loss(output, target) * kept[0].add_(1).clone())
    assert kept[0].item() == 0


@pytest.mark.parametrize("holder", [list, tuple, set])
def test_constants_may_be_kept_anywhere(holder: Callable[[Any], Any]) -> None:
    kept = holder([torch.full((8,), 0.5)])

    def loss(output: Tensor, target: Tensor) -> Tensor:
        (weight,) = kept
        return mse_loss(output * weight, target)

    assert _captured(loss) == _plain(loss)


class _Annealed:
    """KL annealing."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.n += 1
        return min(1.0, self.n / 10) * mse_loss(output, target)


class _AnnealedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    forward = _Annealed.__call__


def _counting_closure() -> Loss:
    n = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return n * mse_loss(output, target)

    return loss


def _counting_global(output: Tensor, target: Tensor) -> Tensor:
    global _calls
    _calls += 1
    return _calls * mse_loss(output, target)


def _counting_default(output: Tensor, target: Tensor, *, n: Any = ([0],)) -> Tensor:
    n[0][0] += 1
    result: Tensor = n[0][0] * mse_loss(output, target)
    return result


class _Replacing:
    def __init__(self) -> None:
        self.c = torch.zeros(8)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        value = mse_loss(output - self.c, target)
        self.c = self.c * 0.9 + output.detach().mean(0)
        return value


def _replacing_closure() -> Loss:
    c = torch.zeros(8)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal c
        value = mse_loss(output - c, target)
        c = c * 0.9 + output.detach().mean(0)
        return value

    return loss


def _drawing() -> Loss:
    own = random.Random(0)
    return lambda output, target: mse_loss(output, target) * own.random()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_Annealed, r"change loss\.n\."),
        (_AnnealedModule, r"change loss\.n\."),
        (_counting_closure, r"change loss\.n\."),
        (lambda: _counting_global, r"change _calls\."),
        (lambda: _counting_default, r"change loss\.n\.0\.0\."),
        (_Replacing, r"change loss\.c\."),
        (_replacing_closure, r"change loss\.c\."),
        (_drawing, "random numbers"),
    ],
)
def test_what_cannot_follow_is_refused_by_name(make: Callable[[], Loss], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        compared(_model(), make(), _BATCHES)
    assert _calls == 0
    assert _counting_default.__kwdefaults__ == {"n": ([0],)}
