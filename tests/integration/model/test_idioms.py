"""Models of `idioms`: plain torch's bits through stages, and devices can measure them."""

from __future__ import annotations

import copy

import pytest
import torch

from p2ptrain.model.captured import Captured
from p2ptrain.model.description import ModelDescription
from p2ptrain.model.effects import draws_random_numbers
from p2ptrain.model.measure import measure_units
from tests import zoo
from tests.integration.model import idioms
from tests.reference import call, stack
from tests.unit.model import pipeline
from tests.unit.model.pipeline import assert_same

torch.set_num_threads(1)


def _received(made: zoo.Made) -> Captured:
    """Captured, with the description as a device reads it."""
    model = pipeline.captured(made)
    model.description = ModelDescription.from_bytes(model.description.to_bytes())
    return model


@pytest.mark.parametrize("name", idioms.NAMES)
def test_it_trains_through_stages_and_is_measured(name: str) -> None:
    made = idioms.make(name, pipeline.BATCH)
    plain = pipeline.plain_step(made)
    model = _received(made)
    units = len(model.description.units)
    whole = pipeline.pipeline_step(made, model, (0, units))
    if any(map(draws_random_numbers, model.description.train.nodes)):
        plain = whole  # masks are seeded by device-independent rules
    assert_same(plain, whole)
    assert_same(plain, pipeline.pipeline_step(made, model, range(units + 1), split=True))
    measured = measure_units(model.description, batch_sizes=[2], budget_seconds=0.0)
    assert len(measured.units) == units


@pytest.mark.parametrize("name", ["kept", "packed_gru", "complex", "experts", "codebook"])
def test_it_evaluates_and_is_left_as_it_was(name: str) -> None:
    made = idioms.make(name, pipeline.BATCH)
    held = {n: t.clone() for n, t in vars(made.model).items() if isinstance(t, torch.Tensor)}
    model = _received(made)
    for attribute, tensor in held.items():
        assert torch.equal(getattr(made.model, attribute), tensor), attribute
    x, y = stack(made.data[:5])
    with torch.no_grad():
        expected = call(copy.deepcopy(made.model).eval(), x)
    units = range(len(model.description.units) + 1)
    loss, output = pipeline.evaluate(model, units, x, y)
    assert torch.equal(output, expected)
    assert torch.equal(loss, made.loss(expected, y))


def test_distances_are_computed_as_torch_does_for_large_batches_too() -> None:
    """Beyond 25 vectors it multiplies matrices instead."""
    made = idioms.make("codebook", 30)
    model = _received(made)
    x, y = stack(made.data)
    (loss,) = pipeline.evaluate(model, (0, len(model.description.units)), x, y)[:1]
    assert torch.equal(loss, made.loss(made.model.eval()(x), y).detach())
