"""What capture gives on the holder's side, and what it says to those whose model it cannot take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy, mse_loss

from p2ptrain.errors import CaptureError, ScriptError
from p2ptrain.model.capture.capture import capture
from tests.support.odd_models import AfterLinear

_EXAMPLE = torch.randn(4, 8), torch.randn(4, 8)


def test_a_layer_of_torch_that_decides_on_values_is_explained() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None))
    with pytest.raises(CaptureError, match="momentum=None"):
        capture(model, mse_loss, _EXAMPLE)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda o, t: mse_loss(o, t, reduction="none"), r"shape \['batch', 8\]"),
        (lambda o, t: (o > t).sum(), "torch.int64"),
        (lambda o, t: 1.0, "a float"),
    ],
)
def test_a_loss_that_is_no_single_number_is_refused(loss: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        capture(nn.Linear(8, 8), loss, _EXAMPLE)


@pytest.mark.parametrize(
    "example",
    [
        (torch.randn(1, 8), torch.randn(1, 8)),
        (torch.randn(4, 8), torch.randn(3, 8)),
        (torch.randn(4, 8), torch.tensor(1.0)),
        ((), torch.randn(4, 8)),
        (object(), torch.randn(4, 8)),
    ],
)
def test_an_unusable_example_is_refused(example: Any) -> None:
    with pytest.raises(ScriptError):
        capture(nn.Linear(8, 8), mse_loss, example)


def _hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    return x


def _node_hooked(x: Tensor) -> Tensor:
    made = torch.tanh(x)
    assert made.grad_fn is not None
    assert made.grad_fn.name() == "TanhBackward0"
    made.grad_fn.register_hook(lambda given, got: [gradient * 2 for gradient in given])
    return made


def _with_module_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].register_full_backward_hook(lambda module, given, got: None)
    return model


def _with_parameter_hook() -> nn.Module:
    model = nn.Linear(8, 8)
    model.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (AfterLinear(_hooked), r"forward\(\) changes or reads"),
        (AfterLinear(_node_hooked), r"forward\(\) changes or reads"),
        (_with_module_hook(), "0 changes or reads"),
        (_with_parameter_hook(), "weight changes or reads"),
    ],
)
def test_hooks_on_gradients_are_refused(model: nn.Module, says: str) -> None:
    with pytest.raises(CaptureError, match=f"{says} gradients in a backward hook"):
        capture(model, mse_loss, _EXAMPLE)


def test_packing_what_autograd_keeps_is_refused() -> None:
    def packs(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda kept: kept.half(), lambda kept: kept.float()):
            return torch.tanh(x)

    with pytest.raises(CaptureError, match="Remove the hooks"):
        capture(AfterLinear(packs), mse_loss, _EXAMPLE)


def test_switching_autocast_by_hand_is_refused() -> None:
    def switches(x: Tensor) -> Tensor:
        torch.set_autocast_enabled("cpu", True)
        try:
            return (x @ x.T @ x).float()
        finally:
            torch.set_autocast_enabled("cpu", False)

    with pytest.raises(CaptureError, match=r"Use `with torch\.autocast"):
        capture(AfterLinear(switches), mse_loss, _EXAMPLE)


class _Freezes(nn.Module):
    """A critic that `freeze` is asked to freeze and to free, around its use."""

    def __init__(self, freeze: Callable[[nn.Linear, bool], object]) -> None:
        super().__init__()
        self.linear, self.critic = nn.Linear(8, 8), nn.Linear(8, 8)
        self.freeze = freeze

    def forward(self, x: Tensor) -> Tensor:
        self.freeze(self.critic, False)
        x = self.critic(self.linear(x))
        self.freeze(self.critic, True)
        return x


def _assigns(critic: nn.Linear, value: bool) -> None:
    critic.weight.requires_grad = value


@pytest.mark.parametrize(
    "freeze",
    [
        lambda critic, value: critic.requires_grad_(value),
        lambda critic, value: critic.weight.requires_grad_(requires_grad=value),
        _assigns,
    ],
)
def test_a_parameter_that_is_frozen_for_a_while_is_refused(
    freeze: Callable[[nn.Linear, bool], object],
) -> None:
    model = _Freezes(freeze)
    with pytest.raises(CaptureError, match="switches requires_grad of a parameter"):
        capture(model, mse_loss, _EXAMPLE)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_other_switches_of_gradients_are_followed() -> None:
    def f(x: Tensor) -> Tensor:
        return x + torch.tanh(x.detach().requires_grad_())

    assert capture(AfterLinear(f), mse_loss, _EXAMPLE).description.units
    free = _Freezes(lambda critic, value: critic.requires_grad_(True))
    assert capture(free, mse_loss, _EXAMPLE).description.units


class _Anneals(nn.Module):
    """Computes with a number that it changes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.temperature = 2.0

    def forward(self, x: Tensor) -> Tensor:
        self.temperature *= 0.9
        out: Tensor = self.linear(x) / self.temperature
        return out


def test_numbers_that_change_from_batch_to_batch_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"numbers .* \(0\.temperature\)"):
        capture(nn.Sequential(_Anneals()), mse_loss, _EXAMPLE)


class WithoutGradient(nn.Module):
    """Its forward is not recorded, and plain torch would refuse the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.layer(x)


@pytest.mark.parametrize("learns", [False, True])
def test_a_loss_that_no_parameter_has_a_part_in_is_refused(*, learns: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), WithoutGradient())
    x, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)
    if learns:
        model.append(nn.Linear(2, 2))
        capture(model, cross_entropy, (x, y))
        return
    with pytest.raises(CaptureError, match="depends on no parameter that requires a gradient"):
        capture(model, cross_entropy, (x, y))


def test_torchs_own_logs_of_a_failed_trace_are_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError):
        capture(nn.Linear(5, 2), mse_loss, (torch.zeros(4, 3), torch.zeros(4, 2)))
    assert capfd.readouterr().err == ""
