"""Split backwards, carried out as their inputs come, train bit for bit as plain torch does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import pytest
import torch

from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage import stage as model_stage
from p2ptrain.model.stage.optimizer_spec import AdamW
from tests.integration.training.group_plans import Stage, dealt, device_count, divided, force
from tests.integration.training.household import devices
from tests.support import zoo
from tests.support.curves import Case, difference, job_of, outcome_of, plain_torch
from tests.support.reference import Outcome

Parts: TypeAlias = dict[model_stage.Stage, list[int]]


def _split(*stages: Stage, slack: int) -> list[Stage]:
    """All but the first, for which no stage waits."""
    return [stages[0], *(replace(stage, slack=slack) for stage in stages[1:])]


async def _trained(monkeypatch: pytest.MonkeyPatch, plan: Sequence[Stage], case: Case) -> Outcome:
    force(monkeypatch, plan)
    made = zoo.make(case.model, dtype=case.dtype)
    async with devices(device_count(plan)) as household:
        options = TrainOptions(wait_for=case.devices, steps=case.steps)
        await household.holder_run(job_of(case, made), options).run()
        return outcome_of(household.losses, made)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    """Keys of the micro-batches whose gradients of weights a stage has computed, as it did."""
    calls: Parts = {}
    original = model_stage.Stage.backward_weights

    def backward_weights(self: model_stage.Stage, *keys: int, final: object = None) -> None:
        calls.setdefault(self, []).extend(keys)
        original(self, *keys, final=final)  # type: ignore[arg-type]

    monkeypatch.setattr(model_stage.Stage, "backward_weights", backward_weights)
    return calls


@pytest.mark.parametrize(
    ("case", "slack"),
    [
        (Case("cnn", devices=2, steps=4), 0),
        (Case("residual", devices=3, steps=4), 2),
        (Case("mlp", devices=4, micro_batch=2, steps=4), 4),
        (Case("mlp", devices=3, micro_batch=5, steps=4), 1),  # 5 + 5 + 5 + 1
        (Case("gpt", devices=3, optimizer=AdamW(lr=0.01), clip_grad_norm=0.5, steps=4), 1),
    ],
    ids=str,
)
async def test_the_curve_is_plain_torchs(
    monkeypatch: pytest.MonkeyPatch, parts: Parts, case: Case, slack: int
) -> None:
    plan = _split(*(divided(case.micro_batch) for _ in range(case.devices)), slack=slack)
    ours, reference = await _trained(monkeypatch, plan, case), plain_torch(case)
    assert ours.losses == reference.losses
    assert difference(ours, reference).state == 0.0
    micro_batches = -(-case.batch_size // case.micro_batch)
    training = [keys for keys in parts.values() if any(keys)]  # profiling has micro-batch 0 only
    assert training == [[*range(micro_batches)] * case.steps] * (case.devices - 1)


@pytest.mark.parametrize(
    "stages", [(divided(4), divided(3, 1)), (divided(3, 1), dealt(2, 2), divided(4))]
)
async def test_groups_reduce_what_is_computed_last(
    monkeypatch: pytest.MonkeyPatch, stages: Sequence[Stage]
) -> None:
    plan = _split(*stages, slack=1)
    case = Case("mlp", devices=device_count(plan), steps=4, dtype=torch.float64)
    found = difference(await _trained(monkeypatch, plan, case), plain_torch(case))
    assert found.loss < 1e-8
    assert found.state < 1e-8
