"""Stages give the bits that plain torch gives, wherever the model is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.model.captured import Captured
from tests import zoo
from tests.unit.model import pipeline

torch.set_num_threads(1)

_TIED = ("gpt", "gpt2", "opt")
_PLAIN = tuple(name for name in zoo.OWN if name != "dropout")


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[zoo.Made, Captured, pipeline.Result]]:
    return {}


def _prepared(
    models: dict[str, tuple[zoo.Made, Captured, pipeline.Result]], name: str
) -> tuple[zoo.Made, Captured, pipeline.Result]:
    if name not in models:
        made = zoo.make(name, samples=pipeline.BATCH)
        models[name] = made, pipeline.captured(made), pipeline.plain_step(made)
    return models[name]


def _assert_same(name: str, plain: pipeline.Result, ours: pipeline.Result, units: int) -> None:
    assert [float(a) for a in ours.losses] == [float(b) for b in plain.losses]
    for key, gradient in plain.gradients.items():
        mine = ours.gradients.get(key)
        if gradient is None:
            assert mine is None
        elif name in _TIED and units > 1:
            torch.testing.assert_close(mine, gradient)
        else:
            assert torch.equal(mine, gradient), key
    for key, tensor in ours.state.items():
        if key in plain.state:
            assert torch.equal(tensor, plain.state[key]), key


@pytest.mark.parametrize("name", _PLAIN)
def test_every_unit_a_stage_gives_plain_torch_bits(models, name: str) -> None:
    made, model, plain = _prepared(models, name)
    boundaries = range(len(model.description.units) + 1)
    ours = pipeline.pipeline_step(made, model, boundaries)
    _assert_same(name, plain, ours, len(boundaries) - 1)


@pytest.mark.parametrize("name", _PLAIN)
def test_one_stage_gives_plain_torch_bits(models, name: str) -> None:
    made, model, plain = _prepared(models, name)
    ours = pipeline.pipeline_step(made, model, (0, len(model.description.units)))
    _assert_same(name, plain, ours, 1)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), name=st.sampled_from(("residual", "unet", "frozen", "inner_structures")))
def test_any_cuts_give_plain_torch_bits(models, data: st.DataObject, name: str) -> None:
    made, model, plain = _prepared(models, name)
    units = len(model.description.units)
    inner = data.draw(st.sets(st.integers(1, units - 1)))
    ours = pipeline.pipeline_step(made, model, sorted({0, units, *inner}))
    _assert_same(name, plain, ours, len(inner) + 1)
