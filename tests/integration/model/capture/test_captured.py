"""Tensors in one another's memory are refused by name, where training would write to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from p2ptrain.errors import CaptureError
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured

_EXAMPLE = torch.randn(4, 8), torch.randn(4, 8)


def _captured(model: nn.Module, loss: Callable[..., Tensor] = mse_loss) -> Captured:
    """For training: whether it is evaluated too makes no difference here."""
    return capture(model, loss, _EXAMPLE, evaluation=False)


class _Model(nn.Module):
    """Two linear layers, `setup(self)`, and `f(self, x)` behind them."""

    def __init__(
        self, setup: Callable[[Any], object], f: Callable[[Any, Tensor], Tensor] = lambda m, x: x
    ) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.f = f
        setup(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, self.two(torch.tanh(self.one(x))))


def _ties_data(model: Any) -> None:
    model.two.weight.data = model.one.weight.data


def _makes_a_parameter_of_one(model: Any) -> None:
    model.other = nn.Parameter(model.one.weight.data)


def _registers_a_view(model: Any) -> None:
    model.register_buffer("turned", model.one.weight.data.t())


def _keeps_a_view(model: Any) -> None:
    model.turned = model.one.weight.data.t()


def _repeats(model: Any) -> None:
    model.register_buffer("seen", torch.zeros(1).expand(8))
    model.frozen = nn.Parameter(torch.ones(1).expand(8), requires_grad=False)


def _repeats_a_weight(model: Any) -> None:
    model.one.bias = nn.Parameter(torch.zeros(1).expand(8))


def _writes_to_what_repeats(model: Any, x: Tensor) -> Tensor:
    model.seen.add_(1)
    return x


def _registers_views_of_a_buffer(model: Any) -> None:
    model.register_buffer("seen", torch.zeros(8))
    model.register_buffer("part", model.seen[4:])


def _writes_to_it(model: Any, x: Tensor) -> Tensor:
    model.seen.add_(1)
    return x * model.part.sum()


def _takes_numpys(model: Any) -> None:
    model.register_buffer("other", torch.from_numpy(model.one.weight.detach().numpy()))


@pytest.mark.parametrize(
    ("setup", "f", "names"),
    [
        (_ties_data, lambda m, x: x, ("'one.weight'", "'two.weight'")),
        (_makes_a_parameter_of_one, lambda m, x: x @ m.other, ("'one.weight'", "'other'")),
        (_registers_a_view, lambda m, x: x @ m.turned, ("'one.weight'", "'turned'")),
        (_registers_a_view, lambda m, x: x, ("'one.weight'", "'turned'")),
        (_keeps_a_view, lambda m, x: x @ m.turned, ("'one.weight'", "'turned'")),
        (_registers_views_of_a_buffer, _writes_to_it, ("'seen'", "'part'")),
        (_takes_numpys, lambda m, x: x, ("'one.weight'", "'other'")),
    ],
)
def test_memory_of_two_tensors_that_is_written_to_is_refused(
    setup: Callable[[Any], object], f: Callable[[Any, Tensor], Tensor], names: tuple[str, str]
) -> None:
    with pytest.raises(CaptureError, match="lie in the same memory") as caught:
        _captured(_Model(setup, f))
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize(
    ("setup", "f", "name"),
    [
        (_repeats_a_weight, lambda m, x: x, "'one.bias'"),
        (_repeats, _writes_to_what_repeats, "'seen'"),
    ],
)
def test_a_tensor_that_repeats_its_memory_is_refused_where_it_is_written_to(
    setup: Callable[[Any], object], f: Callable[[Any, Tensor], Tensor], name: str
) -> None:
    with pytest.raises(CaptureError, match=f"elements of {name} lie in the same memory"):
        _captured(_Model(setup, f))


def test_one_that_nothing_writes_to_is_as_it_was_when_the_weights_come_home() -> None:
    captured = _captured(_Model(_repeats, lambda m, x: x * m.seen * m.frozen))
    captured.load_state({name: tensor + 0 for name, tensor in captured.state().items()})
    assert captured.state()["frozen"].tolist() == [1.0] * 8


def test_a_view_of_a_parameter_in_the_loss_is_refused() -> None:
    model = _Model(lambda m: None)
    turned = model.one.weight.data.t()
    with pytest.raises(CaptureError, match="a tensor outside the model"):
        _captured(model, lambda output, target: mse_loss(output @ turned, target))


def _ties_the_parameter(model: Any) -> None:
    model.two.weight = model.one.weight


def _registers_a_view_of_constants(model: Any) -> None:
    _registers_views_of_a_buffer(model)
    model.least = model.seen[:2]


def _ties_frozen_ones(model: Any) -> None:
    _ties_data(model)
    model.one.weight.requires_grad_(False)
    model.two.weight.requires_grad_(False)


def _cuts_one_matrix_in_two(model: Any) -> None:
    both = torch.randn(8, 16)
    model.one.weight.data, model.two.weight.data = both[:, :8], both[:, 8:]


@pytest.mark.parametrize(
    ("setup", "f"),
    [
        (_ties_the_parameter, lambda m, x: x),
        (_registers_a_view_of_constants, lambda m, x: x * m.part.sum() + m.least.sum()),
        (_ties_frozen_ones, lambda m, x: x),
        (_cuts_one_matrix_in_two, lambda m, x: x),
        (_keeps_a_view, lambda m, x: x),
    ],
)
def test_other_memory_may_be_common(
    setup: Callable[[Any], object], f: Callable[[Any, Tensor], Tensor]
) -> None:
    assert _captured(_Model(setup, f)).description.units
