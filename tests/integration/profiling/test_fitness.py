"""A model's own units show what an accelerator computes wrong."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from p2ptrain.model.capture.capture import capture
from p2ptrain.profiling.fitness import (
    FitnessLimits,
    disagreement,
    dtypes_of,
    misfit,
    names_of_operators,
)
from tests.support.prepared_models import Get
from tests.support.twin_device import TwinDevice


@pytest.fixture
def twin() -> Iterator[TwinDevice]:
    """Whose thread this is; nothing is left in it."""
    device = TwinDevice()
    device.prepare_thread()
    yield device
    device.assert_empty()


@pytest.mark.parametrize("name", ["cnn", "gpt", "decayed_weight", "reassigned_buffer"])
def test_what_computes_the_same_may_compute_a_model(
    name: str, prepared: Get, twin: TwinDevice
) -> None:
    description = prepared(name).model.description
    assert disagreement(description, twin, 4, FitnessLimits(seconds=1e6)) is None


def doubled(tensor: torch.Tensor) -> object:
    return tensor.mul_(1.01)


@pytest.mark.parametrize(
    ("operator", "backward", "words"),
    [
        ("aten.addmm.default", False, "0 is off by 0.0"),
        ("aten.threshold_backward.default", True, "is off by 0.0"),
    ],
)
def test_a_unit_that_differs_is_named(
    operator: str, backward: bool, words: str, prepared: Get, twin: TwinDevice
) -> None:
    description = prepared("mlp").model.description
    twin.compute_wrong(operator, backward=backward, how=doubled)
    assert words in str(disagreement(description, twin, 4))


class _Block(nn.Module):
    """One unit, as what skips it joins in again at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)) + x.sum(1, keepdim=True)


def test_rounding_is_no_difference_even_where_a_gradient_is_nothing_else(
    twin: TwinDevice,
) -> None:
    """As of the bias of a convolution before a norm."""
    batch = torch.randn(4, 3, 9, 9), torch.tensor([0, 1, 2, 0])
    model = nn.Sequential(_Block(), nn.Flatten(), nn.Linear(8 * 81, 3))
    description = capture(model, nn.functional.cross_entropy, batch, evaluation=False).description
    noise = torch.Generator().manual_seed(3)

    def rounded(tensor: torch.Tensor) -> object:
        return tensor.mul_(1 + 1e-6 * torch.randn(tensor.shape, generator=noise))

    twin.compute_wrong("aten.convolution.default", how=rounded)
    twin.compute_wrong("aten.native_batch_norm.default", how=rounded)
    twin.compute_wrong("aten.native_batch_norm_backward.default", how=rounded)
    twin.compute_wrong("aten.convolution_backward.default", how=rounded)
    assert disagreement(description, twin, 4) is None


def test_what_differs_with_one_draw_alone_is_chance(prepared: Get, twin: TwinDevice) -> None:
    """A number near the kink of a ReLU."""
    description = prepared("mlp").model.description
    once = iter([1.01])
    twin.compute_wrong("aten.addmm.default", how=lambda tensor: tensor.mul_(next(once, 1.0)))
    assert disagreement(description, twin, 4) is None
    once = iter([1.01])
    assert disagreement(description, twin, 4, FitnessLimits(draws=1)) is not None


def test_nan_is_seen_and_the_time_is_bounded(prepared: Get, twin: TwinDevice) -> None:
    description = prepared("mlp").model.description
    twin.compute_wrong("aten.addmm.default")
    assert "gives NaN" in str(disagreement(description, twin, 4))
    ticks = itertools.count(0, 10)
    assert disagreement(description, twin, 4, clock=lambda: float(next(ticks))) is None


def test_a_type_that_a_device_has_not_is_named(prepared: Get, twin: TwinDevice) -> None:
    description = prepared("mlp").model.description
    assert misfit(description, twin) is None
    twin.lacks = frozenset({"float32", "float64"})
    assert misfit(description, twin) == "it has no float32"


def test_what_does_not_fit_its_memory_is_not_compared_and_leaves_nothing_there(
    prepared: Get, twin: TwinDevice
) -> None:
    description = prepared("mlp").model.description
    twin.compute_wrong("aten.threshold_backward.default", backward=True, how=doubled)
    whole_bytes = twin.memory().total_bytes
    for free_bytes in (1000, 266_900, 300_000):  # before, while and after the first unit is there
        twin.others_bytes = whole_bytes - free_bytes
        assert disagreement(description, twin, 4) is None
        assert not twin.live()


def test_operators_and_types_of_a_model(prepared: Get) -> None:
    description = prepared("mlp").model.description
    assert {"linear", "relu"} <= names_of_operators(description)
    assert "float32" in dtypes_of(description)
    assert "bfloat16" in dtypes_of(prepared("mlp", torch.bfloat16).model.description)
