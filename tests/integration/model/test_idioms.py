"""Models of `idioms`: plain torch's bits through stages, and devices can measure them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.graph.decoding import decode_model
from p2ptrain.model.graph.effects import draws_random_numbers
from p2ptrain.profiling.measure_units import measure_units
from tests.support import model_idioms, stage_pipeline, zoo
from tests.support.reference import call, stack
from tests.support.stage_pipeline import assert_same

torch.set_num_threads(1)
_EVALUATED = ("kept", "packed_gru", "complex", "experts", "codebook")


@dataclass(frozen=True)
class _Received:
    """A model, captured once, with the description as a device reads it.

    Attributes:
        held: attributes that are tensors, as they were before.
    """

    made: zoo.Made
    model: Captured
    held: dict[str, torch.Tensor]


@cache
def _received(name: str, samples: int = stage_pipeline.BATCH) -> _Received:
    made = model_idioms.make(name, samples)
    held = {n: t.clone() for n, t in vars(made.model).items() if isinstance(t, torch.Tensor)}
    model = stage_pipeline.captured(made, evaluation=name in _EVALUATED)
    model.description = decode_model(model.description.to_bytes())
    return _Received(made, model, held)


@pytest.mark.parametrize("name", model_idioms.NAMES)
def test_it_trains_through_stages_and_is_measured(name: str) -> None:
    made, model = _received(name).made, _received(name).model
    plain = stage_pipeline.plain_step(made)
    units = len(model.description.units)
    whole = stage_pipeline.pipeline_step(made, model, (0, units))
    if any(map(draws_random_numbers, model.description.train.nodes)):
        plain = whole  # masks are seeded by device-independent rules
    assert_same(plain, whole)
    assert_same(plain, stage_pipeline.pipeline_step(made, model, range(units + 1), split=True))
    measured = measure_units(model.description, batch_sizes=[2], budget_seconds=0.0)
    assert len(measured.units) == units


@pytest.mark.parametrize("name", _EVALUATED)
def test_it_evaluates_and_is_left_as_it_was(name: str) -> None:
    made, model = _received(name).made, _received(name).model
    for attribute, tensor in _received(name).held.items():
        assert torch.equal(getattr(made.model, attribute), tensor), attribute
    x, y = stack(made.data[:5])
    with torch.no_grad():
        expected = call(copy.deepcopy(made.model).eval(), x)
    units = range(len(model.description.units) + 1)
    loss, output = stage_pipeline.evaluate(model, units, x, y)
    assert torch.equal(output, expected)
    assert torch.equal(loss, made.loss(expected, y))


def test_distances_are_computed_as_torch_does_for_large_batches_too() -> None:
    """Beyond 25 vectors it multiplies matrices instead."""
    made, model = _received("codebook", 30).made, _received("codebook", 30).model
    x, y = stack(made.data)
    (loss,) = stage_pipeline.evaluate(model, (0, len(model.description.units)), x, y)[:1]
    assert torch.equal(loss, made.loss(made.model.eval()(x), y).detach())
