"""A model's own units show what an accelerator computes wrong."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from p2ptrain.profiling.fitness import FitnessLimits, disagreement, dtypes_of, operators_of
from tests.support.prepared_models import Get
from tests.support.twin_device import TwinDevice


@pytest.fixture
def twin() -> Iterator[TwinDevice]:
    """Whose thread this is; nothing is left in it."""
    device = TwinDevice()
    device.prepare_thread()
    yield device
    device.assert_empty()


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
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


def test_nan_is_seen_and_the_time_is_bounded(prepared: Get, twin: TwinDevice) -> None:
    description = prepared("mlp").model.description
    twin.compute_wrong("aten.addmm.default")
    assert "gives NaN" in str(disagreement(description, twin, 4))
    ticks = itertools.count(0, 10)
    assert disagreement(description, twin, 4, clock=lambda: float(next(ticks))) is None


def test_operators_and_types_of_a_model(prepared: Get) -> None:
    description = prepared("mlp").model.description
    assert {"aten.linear.default", "aten.relu.default"} <= operators_of(description)
    assert "float32" in dtypes_of(description)
    assert "bfloat16" in dtypes_of(prepared("mlp", torch.bfloat16).model.description)
