"""Stages give the bits that plain torch gives, wherever the model is cut."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from tests.support import odd_models, stage_pipeline, zoo
from tests.support.prepared_models import EVALUATED, Get, Prepared
from tests.support.reference import call, stack
from tests.support.stage_pipeline import assert_same

SLOW = ("recurrent", "attention")
"""Captured in seconds, and tried in fewer ways (`test_slow_models.py`)."""
PLAIN = tuple(n for n in (*zoo.OWN, *odd_models.NAMES) if n not in ("dropout", *SLOW))


@pytest.mark.parametrize("name", PLAIN)
def test_every_unit_a_stage_gives_plain_torch_bits(prepared: Get, name: str) -> None:
    case = prepared(name)
    ours = stage_pipeline.pipeline_step(case.made, case.model, range(case.units + 1))
    assert_same(case.plain, ours)


@pytest.mark.parametrize("name", PLAIN)
def test_one_stage_gives_plain_torch_bits(prepared: Get, name: str) -> None:
    case = prepared(name)
    assert_same(case.plain, stage_pipeline.pipeline_step(case.made, case.model, (0, case.units)))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_forwards_ahead_of_the_backwards_give_plain_torch_bits(
    prepared: Get, name: str, split: bool
) -> None:
    """What a forward writes does not reach the backwards of those before it."""
    case = prepared(name)
    stages = range(case.units + 1)
    ours = stage_pipeline.pipeline_step(case.made, case.model, stages, split=split, ahead=True)
    assert_same(case.plain, ours)


@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_float64(prepared: Get, name: str) -> None:
    case = prepared(name, torch.float64)
    assert_same(
        case.plain, stage_pipeline.pipeline_step(case.made, case.model, range(case.units + 1))
    )


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    data=st.data(),
    name=st.sampled_from(("residual", "unet", "frozen", "gpt", "long_skips", "views", "in_place")),
)
def test_any_cuts_give_plain_torch_bits(prepared: Get, data: st.DataObject, name: str) -> None:
    case = prepared(name)
    inner = data.draw(st.sets(st.integers(1, case.units - 1)))
    boundaries = sorted({0, case.units, *inner})
    assert_same(case.plain, stage_pipeline.pipeline_step(case.made, case.model, boundaries))


@pytest.mark.parametrize("name", [name for name in PLAIN if name in EVALUATED])
def test_evaluation_gives_plain_torch_bits(prepared: Get, name: str) -> None:
    assert_evaluates(prepared(name))


def assert_evaluates(case: Prepared, **exact: float) -> None:
    """As plain torch does, to the bit unless `exact` says otherwise (of `assert_close`)."""
    exact = exact or {"rtol": 0.0, "atol": 0.0}
    x, y = stack(case.made.data[:5])
    module = copy.deepcopy(case.made.model).eval()
    with torch.no_grad():
        expected = call(module, pytree.tree_map(torch.clone, x))
        expected_loss = case.made.loss(expected, y)
    loss, *leaves = stage_pipeline.evaluate(case.model, range(case.units + 1), x, y)
    torch.testing.assert_close(loss, expected_loss, **exact)
    output = case.model.unflatten_output(leaves)
    assert pytree.tree_structure(output) == pytree.tree_structure(expected)
    for mine, theirs in zip(*map(pytree.tree_leaves, (output, expected)), strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(mine, theirs, **exact)
        else:
            assert mine == theirs
