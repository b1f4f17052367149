"""A stage: what it keeps of a step, what it draws, refuses and blames, wherever the model is cut.

That stages give the bits of plain torch is tried with every model in tests/integration/model.
"""

from __future__ import annotations

import pytest
import torch

from p2ptrain.errors import InternalError
from p2ptrain.model.stage.stage import Stage
from tests.support import stage_pipeline
from tests.support.prepared_models import Get
from tests.support.reference import stack
from tests.support.stage_pipeline import assert_same


def test_dropout_is_the_same_for_any_cuts_and_leaves_the_generator_alone(prepared: Get) -> None:
    case = prepared("dropout")
    before = torch.get_rng_state()
    whole = stage_pipeline.pipeline_step(case.made, case.model, (0, case.units))
    torch.rand(3)
    apart = stage_pipeline.pipeline_step(case.made, case.model, range(case.units + 1))
    torch.set_rng_state(before)
    assert_same(whole, apart)
    assert [float(a) for a in whole.losses] != [float(b) for b in case.plain.losses]


def test_dropout_differs_between_steps_and_micro_batches(prepared: Get) -> None:
    case = prepared("dropout")
    x, y, _ = stage_pipeline.micro_batches(case.made)[0]
    stage = Stage(case.model.description, 0, case.units, case.model.state())
    losses = {
        stage.forward(key, [x], [y], seed=seed)[0].item()
        for key, seed in enumerate([(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)])
    }
    assert len(losses) == 4


def test_a_batch_of_one_runs(prepared: Get) -> None:
    case = prepared("gpt")
    x, y = stack(case.made.data[:1])
    stage = Stage(case.model.description, 0, case.units, case.model.state())
    (loss,) = stage.forward(0, [x], [y], weight=1.0)
    assert torch.equal(loss, case.made.loss(case.made.model(x), y).detach())


def test_stages_share_no_memory_with_the_users_module(prepared: Get) -> None:
    case = prepared("cnn")
    stage = Stage(case.model.description, 0, case.units, case.model.state())
    own = {tensor.data_ptr() for tensor in case.model.state().values()}
    assert own.isdisjoint(tensor.data_ptr() for tensor in stage.state().values())
    borrowed = Stage(case.model.description, 0, case.units, case.model.state(), copy=False)
    assert own.issuperset(tensor.data_ptr() for tensor in borrowed.state().values())


def test_a_gradient_that_does_not_come_back_is_nothing(prepared: Get) -> None:
    case = prepared("mlp")
    x, _, _ = stage_pipeline.micro_batches(case.made)[0]
    stage = Stage(case.model.description, 0, 1, case.model.state())
    stage.forward(3, [x], [])
    assert stage.held() == 1
    assert stage.backward(3, [None]) == [None]
    assert all(parameter.grad is None for parameter in stage.parameters().values())
    assert stage.held() == 0


def test_missing_or_misshapen_state_is_refused(prepared: Get) -> None:
    case = prepared("mlp")
    state = case.model.state()
    name = case.model.description.state_names(0, 1)[0]
    with pytest.raises(InternalError, match="missing"):
        Stage(case.model.description, 0, 1, {n: t for n, t in state.items() if n != name})
    with pytest.raises(InternalError, match="shape"):
        Stage(case.model.description, 0, 1, state | {name: torch.zeros(2)})


def test_a_micro_batch_is_forwarded_once(prepared: Get) -> None:
    case = prepared("mlp")
    x, y, _ = stage_pipeline.micro_batches(case.made)[0]
    stage = Stage(case.model.description, 0, case.units, case.model.state())
    stage.forward(0, [x], [y])
    with pytest.raises(InternalError, match="already"):
        stage.forward(0, [x], [y])
    stage.forget_held()
    stage.forward(0, [x], [y])


def test_a_loss_that_is_not_finite_is_traced_to_its_unit(prepared: Get) -> None:
    case = prepared("cnn")
    description = case.model.description
    x, y, _ = stage_pipeline.micro_batches(case.made)[0]
    broken_unit = 2
    name = description.trainable_names(broken_unit, broken_unit + 1)[0]
    state = {n: t.clone() for n, t in case.model.state().items()}
    state[name].flatten()[0] = float("nan")
    stage = Stage(description, 0, case.units, state)
    stage.forward(0, [x], [y])
    buffers = {n: t.clone() for n, t in stage.state().items()}
    found = stage.first_non_finite(0)
    assert found is not None
    assert (found.unit, found.parameters) == (broken_unit, True)
    for key, tensor in stage.state().items():
        torch.testing.assert_close(tensor, buffers[key], equal_nan=True, rtol=0, atol=0)
    stage.forward(1, [torch.full_like(x, float("nan"))], [y])
    blamed = stage.first_non_finite(1)
    assert blamed is not None
    assert blamed.unit is None


def test_a_finite_micro_batch_is_not_blamed(prepared: Get) -> None:
    case = prepared("gpt")  # its attention mask is made of infinities
    x, y, _ = stage_pipeline.micro_batches(case.made)[0]
    stage = Stage(case.model.description, 0, case.units, case.model.state())
    stage.forward(0, [x], [y])
    assert stage.first_non_finite(0) is None
