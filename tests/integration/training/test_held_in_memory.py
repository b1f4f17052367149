"""A stage never keeps more micro-batches for the backward than its plan says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage import stage as model_stage
from p2ptrain.runtime import sync_executor
from p2ptrain.runtime.live_stage import LiveStage
from tests.integration.training.group_plans import Stage, dealt, device_count, divided, force
from tests.integration.training.household import devices
from tests.support import zoo
from tests.support.curves import Case, job_of


class Counting:
    """What the stages of a test may hold, and the most that each has held; by stage."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limits: dict[model_stage.Stage, int] = {}
        self.most: dict[model_stage.Stage, int] = {}
        forward, connect = model_stage.Stage.forward, sync_executor.SyncStageExecutor.__init__

        def counted(stage: model_stage.Stage, *args: Any, **kwargs: Any) -> Any:
            outputs = forward(stage, *args, **kwargs)
            self.most[stage] = max(self.most.get(stage, 0), stage.held())
            return outputs

        def connected(
            runner: sync_executor.SyncStageExecutor,
            task: sync_executor.StageSpec,
            live: LiveStage,
            *rest: Any,
        ) -> None:
            self.limits[live.stage] = task.warmup if task.held is None else task.held
            connect(runner, task, live, *rest)

        monkeypatch.setattr(model_stage.Stage, "forward", counted)
        monkeypatch.setattr(sync_executor.SyncStageExecutor, "__init__", connected)


@pytest.mark.parametrize(
    "plan",
    [
        [divided(4)] * 3,
        [divided(4), Stage((4,), slack=0), Stage((4,), slack=2)],
        [divided(2, 2), divided(4)],
        [dealt(2, 2), divided(4)],
    ],
    ids=["straight", "split", "divided", "dealt"],
)
async def test_no_stage_holds_more_than_planned(
    monkeypatch: pytest.MonkeyPatch, plan: Sequence[Stage]
) -> None:
    counting = Counting(monkeypatch)
    force(monkeypatch, plan)
    case = Case("mlp", devices=device_count(plan), steps=3)
    made = zoo.make(case.model)
    async with devices(case.devices) as household:
        options = TrainOptions(wait_for=case.devices, steps=case.steps)
        await household.holder_run(job_of(case, made), options).run()
    assert len(counting.limits) == case.devices
    for stage, limit in counting.limits.items():
        assert 1 <= counting.most[stage] <= limit
    first = next(stage for stage in counting.limits if stage.first == 0)
    if not plan[0].allocation.startswith("micro"):
        assert counting.most[first] == counting.limits[first], "it fills its depth"
