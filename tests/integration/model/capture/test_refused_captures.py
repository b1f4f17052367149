"""What capture gives on the holder's side, and what it says to those whose model it cannot take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from p2ptrain.errors import CaptureError, ScriptError
from p2ptrain.model.capture.capture import capture
from tests.support.compared import compared
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
        (lambda o, t: 1.0, r"leave out \.item\(\)"),
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


def test_switching_autocast_by_hand_is_refused() -> None:
    def switches(x: Tensor) -> Tensor:
        torch.set_autocast_enabled("cpu", True)
        try:
            return (x @ x.T @ x).float()
        finally:
            torch.set_autocast_enabled("cpu", False)

    with pytest.raises(CaptureError, match=r"the loss of batch 1 .* `with torch\.autocast"):
        compared(AfterLinear(switches), mse_loss, [_EXAMPLE])


@pytest.mark.parametrize(
    ("layer", "called"),
    [(nn.GRU(8, 8), "nn.GRU"), (lambda x: (nn.Bilinear(8, 8, 8)(x, x),), "nn.Bilinear")],
)
def test_what_autocast_casts_the_insides_of_as_a_whole_is_refused(layer: Any, called: str) -> None:
    module = AfterLinear(lambda x: layer(x[:, None])[0].flatten(1))
    with pytest.raises(
        CaptureError, match=f"calls {called} under torch.autocast, .* enabled=False"
    ):
        capture(module, mse_loss, _EXAMPLE, autocast=torch.bfloat16)


def test_other_switches_of_gradients_are_followed() -> None:
    def f(x: Tensor) -> Tensor:
        return x + torch.tanh(x.detach().requires_grad_())

    assert capture(AfterLinear(f), mse_loss, _EXAMPLE, evaluation=False).description.units


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
