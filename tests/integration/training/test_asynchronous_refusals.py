"""What a job without a barrier may not ask for, with models as they are captured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.coordinator.plan_cluster import plan_cluster
from p2ptrain.errors import OptionError, PlanError, ProtocolError
from p2ptrain.holder.start.model_limits import check_asynchronous, why_unshared
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.messages.assignment import Assignment
from p2ptrain.model.graph.description import ModelDescription
from tests.integration.training.jobs import make_job
from tests.support import captures, zoo
from tests.support.reference import stack
from tests.unit.job.test_planning import (
    DEALT,
    DOUBLE,
    STASHED,
    UNSTASHED,
    VERTICAL,
    asked,
    assignment,
    household,
)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("mlp", {"clip_grad_norm": 1.0}, "clip_grad_norm needs the gradients of all layers"),
        ("gpt", {}, "is used by several layers"),
    ],
)
def test_what_has_no_meaning_without_a_barrier_is_refused_with_the_reason(
    name: str, changes: dict[str, object], words: str
) -> None:
    job = make_job(name, micro_batch=None, **changes)
    description = capture_of(name)
    chosen = TrainOptions(mode="async", asynchrony=STASHED)
    with pytest.raises(OptionError, match=words):
        check_asynchronous(job, description, chosen)


def test_an_ordinary_job_is_not_refused() -> None:
    job = make_job("cnn", micro_batch=None)
    check_asynchronous(job, capture_of("cnn"), TrainOptions(mode="async", asynchrony=STASHED))


def test_devices_take_turns_where_the_weights_kept_allow_it() -> None:
    mlp, cnn = (capture_of(name) for name in ("mlp", "cnn"))
    assert why_unshared(STASHED, mlp) == ""
    assert "running statistics" in why_unshared(STASHED, cnn)
    for how, name in (
        (VERTICAL, "vertical sync"),
        (DOUBLE, "two versions"),
        (UNSTASHED, "no stashing"),
        (AsyncOptions(aggregate=2), "aggregation"),
    ):
        assert f"with {name} has one device for each part" in why_unshared(how, mlp)
        alone = replace(asked(how, "dp").sharing, unshared=why_unshared(how, mlp))
        with pytest.raises(PlanError, match="planner dp gives layers to several devices"):
            plan_cluster(asked(how, "dp", sharing=alone), household())
    plan = plan_cluster(asked(STASHED, "dp"), household())
    assert [(len(s.devices), s.warmup, s.allocation) for s in plan.stages] == [(3, 3, DEALT)]
    sent = assignment(plan, STASHED)
    assert Assignment.from_bytes(sent.to_bytes()) == sent
    with pytest.raises(ProtocolError, match="single devices"):
        Assignment.from_bytes(replace(sent, asynchrony=VERTICAL).to_bytes())


def capture_of(name: str) -> ModelDescription:
    job = make_job(name, micro_batch=None)
    return captures.captured(job.model, job.loss, stack(zoo.make(name).data[:2])).description
