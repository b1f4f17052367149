"""A job that `auto` may tile has a border of units where tiling ends, and computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p2ptrain.holder.start.prepare import prepare
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.tiling.kernels.tileable_operators import NotTiled
from tests.support import captures, zoo
from tests.support.reference import stack
from tests.support.stage_pipeline import evaluate, micro_batches, pipeline_step, plain_step


def prepared(made: zoo.Made, planner: str = "auto", *, local: bool = False) -> PreparedJob:
    sizes = {"batch_size": 4, "micro_batch": 2}
    job = Job(made.model, made.data, made.loss, SGD(lr=0.1), **sizes, eval_data=made.data)
    return prepare(job, TrainOptions(planner=planner, local=local))


def captured(made: zoo.Made) -> Captured:
    """As it is without planning."""
    return captures.captured(made.model, made.loss, stack(made.data[:3]))


def units(description: ModelDescription) -> list[str]:
    return [unit.name for unit in description.units]


@pytest.mark.parametrize("name", ["cnn", "residual"])
def test_units_end_where_tiling_does_and_bits_are_the_same(name: str) -> None:
    made = zoo.make(name)
    found, before = prepared(made), units(captured(made).description)
    assert found.maps is not None
    border = len(found.maps.units)
    after = units(found.captured.description)
    assert [*after[:border], *after[border + 1 :]] == before
    borders = [0, border, len(after)]
    ours, plain = pipeline_step(made, found.captured, borders), plain_step(made)
    assert all(map(torch.equal, ours.losses, plain.losses))
    for key, gradient in plain.gradients.items():
        assert gradient is None or torch.equal(gradient, ours.gradients[key]), key
    x, y, _ = micro_batches(made)[0]
    whole = evaluate(captured(made), [0, len(before)], x, y)
    assert all(map(torch.equal, evaluate(found.captured, borders, x, y), whole))


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_models_without_maps_stay_as_they_are(name: str) -> None:
    made = zoo.make(name)
    found = prepared(made)
    assert found.maps is None
    assert found.captured.description == captured(made).description
    with pytest.raises(NotTiled):
        prepared(made, "tiles")


def test_where_nothing_may_be_tiled_units_stay_as_they_are() -> None:
    made = zoo.make("cnn")
    for found in (prepared(made, "pp"), prepared(made, local=True)):
        assert found.maps is None
        assert units(found.captured.description) == units(captured(made).description)


def test_a_module_that_ends_in_a_global_pooling_can_be_tiled_to_its_end() -> None:
    body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    data = [(torch.zeros(3, 8, 8), 0)] * 4
    job = Job(model, data, nn.functional.cross_entropy, SGD(lr=0.1), batch_size=4)
    found = prepare(job, TrainOptions())
    assert found.maps is not None
    assert found.maps.operations[-1].name.startswith("relu")
