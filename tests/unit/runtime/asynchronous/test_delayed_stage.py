"""Stages that train without a barrier, bit for bit as the papers' formulas in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from p2ptrain.errors import InternalError
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.model.stage.optimizer_form import PlainColumns
from p2ptrain.plan.types.weight_versions import Weights
from p2ptrain.recovery.version import Version
from tests.support import delayed_reference
from tests.support.delayed_pipelines import (
    BATCH,
    GENERATION,
    LAGS,
    OPTIMIZER,
    Cut,
    Pipeline,
    network,
    samples,
)
from tests.support.delayed_reference import Recipe
from tests.support.reference import Outcome

torch.set_num_threads(1)
STEPS = 16
"""Two epochs; four times the stages' longest delay and more."""
VERTICAL = AsyncOptions(Weights.VERTICAL)
MEANS = AsyncOptions(aggregate=2)
UNSTASHED = AsyncOptions(Weights.UNSTASHED)
DOUBLE = AsyncOptions(Weights.DOUBLE)


def by_formula(
    pipeline: Pipeline, how: AsyncOptions, steps: int = STEPS, **more: object
) -> Outcome:
    """Plain torch with the same delays."""
    recipe = Recipe(
        OPTIMIZER.build,
        BATCH,
        steps,
        LAGS[how.weights],
        aggregate=how.aggregate,
        stashes=how.weights is not Weights.UNSTASHED,
        **more,  # type: ignore[arg-type]
    )
    loss = torch.nn.functional.cross_entropy
    return delayed_reference.train(network(), samples(), loss, pipeline.names(), recipe)


def assert_same(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("how", [AsyncOptions(), VERTICAL, MEANS, UNSTASHED], ids=str)
def test_losses_and_weights_are_those_of_the_formula(count: int, how: AsyncOptions) -> None:
    pipeline = Pipeline.of(count, how)
    losses = pipeline.train(STEPS)
    wanted = by_formula(pipeline, how)
    assert losses == wanted.losses
    assert_same(pipeline.state(), wanted.state_dict)


@pytest.mark.parametrize("count", [2, 4])
def test_double_buffering_is_one_update_late_everywhere(count: int) -> None:
    pipeline = Pipeline.of(count, DOUBLE)
    losses = pipeline.train(16, pieces=4)
    wanted = by_formula(pipeline, DOUBLE, 16, micro_batch=2)
    assert losses == wanted.losses
    assert_same(pipeline.state(), wanted.state_dict)


def test_the_kinds_differ() -> None:
    """So that equality above means something."""
    ways = [AsyncOptions(), VERTICAL, AsyncOptions(aggregate=1), MEANS, UNSTASHED]
    curves = [tuple(Pipeline.of(3, how).train(12)) for how in ways]
    assert len(set(curves)) == len(ways)
    assert tuple(Pipeline.of(1, AsyncOptions()).train(12)) not in curves


@pytest.mark.parametrize("how", [AsyncOptions(), VERTICAL, AsyncOptions(aggregate=1)], ids=str)
def test_an_emptied_pipeline_counts_from_there(how: AsyncOptions) -> None:
    pipeline = Pipeline.of(3, how)
    losses = pipeline.train(9) + pipeline.train(7, first=9) + pipeline.train(1, first=16)
    wanted = by_formula(pipeline, how, 17, empty=dict.fromkeys((9, 16), pipeline.names()))
    assert losses == wanted.losses
    assert_same(pipeline.state(), wanted.state_dict)


@pytest.mark.parametrize("how", [AsyncOptions(), VERTICAL, UNSTASHED], ids=str)
def test_memory_of_the_versions_is_what_the_planner_counts(how: AsyncOptions) -> None:
    pipeline = Pipeline.of(4, how)
    pipeline.train(20)
    for p, stage in enumerate(pipeline.stages):
        trained = [q for q in stage.stage.parameters().values() if q.requires_grad]
        one = sum(parameter.nbytes for parameter in trained)
        most = {Weights.STASHED: 4 - p, Weights.VERTICAL: 4, Weights.UNSTASHED: 1}[how.weights]
        assert stage.versions.nbytes == most * one
        assert len(stage.versions.kept) <= most


def test_an_update_under_way_is_not_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others read copies of older versions meanwhile, and would be refused them."""
    stage = Pipeline.of(1, AsyncOptions()).stages[0]
    pipeline, seen, step = Pipeline([stage]), [], stage.optimizer.step

    def watched(numbers: PlainColumns) -> None:
        step(numbers)
        seen.append(stage.torn)

    monkeypatch.setattr(stage.optimizer, "step", watched)
    pipeline.train(2)
    assert seen == [False, False]
    monkeypatch.setattr(stage.optimizer, "zero_grad", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pipeline.train(1, first=2)
    assert stage.torn
    assert stage.version == Version(2, GENERATION), "what a failed update leaves counts for nothing"


def test_a_cut_holds_nothing_of_later_mini_batches() -> None:
    """Copies of all stages right after the same update train on as an emptied pipeline would."""
    cut, steps = 6, 15
    pipeline = Pipeline.of(3, AsyncOptions())
    copies: list[dict[str, Tensor]] = [{} for _ in pipeline.stages]
    for p, stage in enumerate(pipeline.stages):
        update = stage.update

        def updated(*what: Any, p: int = p, update: Callable[..., None] = update) -> None:
            update(*what)
            if pipeline.stages[p].version == Version(cut, GENERATION):
                copies[p] = pipeline.stages[p].copied({})

        stage.update = updated  # type: ignore[method-assign]
    pipeline.train(steps)
    again = Pipeline.of(3, AsyncOptions(), Cut(Version(cut, GENERATION), copies))
    losses = again.train(steps - cut, first=cut)
    wanted = by_formula(again, AsyncOptions(), steps, empty={cut: again.names()})
    assert losses == wanted.losses[cut:]
    assert_same(again.state(), wanted.state_dict)


def test_updates_come_in_turn() -> None:
    stage = Pipeline.of(2, AsyncOptions()).stages[0]
    with pytest.raises(InternalError, match="update 1 at"):
        stage.check_step(1)
