"""Where a job may choose, its first plan says whether it trains without a barrier, once for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from p2ptrain import events
from p2ptrain.console import describe
from p2ptrain.coordinator import plan_cluster
from p2ptrain.errors import OptionError
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.plan.types.weight_versions import Weights
from tests.integration.training.delayed import by_formula, cut_of, delayed_job, options
from tests.integration.training.household import Devices, devices
from tests.integration.training.jobs import assert_same_weights, assert_undisturbed
from tests.integration.training.test_asynchronous_life import course
from tests.integration.training.test_recovery_holder import Process
from tests.support.curves import by_plain_torch

STASHED = AsyncOptions()
STEPS = 20


class Deciding:
    """Takes one of the two plans, whatever is predicted, and counts how often it is asked."""

    def __init__(self, mode: PlanMode) -> None:
        self.mode = mode
        self.asked = 0

    def __call__(self, rounds: Plan, seconds: float, free: Plan, weights: Weights) -> Plan:
        self.asked += 1
        assert (rounds.mode, free.mode, weights) == (PlanMode.SYNC, PlanMode.ASYNC, Weights.STASHED)
        return replace(free if self.mode is PlanMode.ASYNC else rounds, mode_reason="it is a test")


@pytest.fixture(params=PlanMode)
def decided(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Deciding:
    """Each of the two outcomes."""
    torch.set_num_threads(1)
    made = Deciding(request.param)
    monkeypatch.setattr(plan_cluster, "choose_mode", made)
    return made


def may_choose(count: int, **more: object) -> TrainOptions:
    return options(count, STASHED, STEPS, mode="auto", **more)


async def test_what_was_chosen_is_trained_to_the_bit_and_said(decided: Deciding) -> None:
    job = delayed_job(micro_batch=4)
    async with devices(3) as household:
        await household.holder_run(job, may_choose(3)).run()
    wanted = {
        PlanMode.ASYNC: lambda: by_formula(delayed_job(), cut_of(household), STASHED, STEPS),
        PlanMode.SYNC: lambda: by_plain_torch(delayed_job(micro_batch=4), STEPS),
    }
    assert_undisturbed(household, job, wanted[decided.mode]())
    assert (household.plan.mode, household.plan.mode_reason) == (decided.mode, "it is a test")
    assert ": it is a test" in describe(household.plan)


async def test_a_death_changes_the_plan_and_not_the_mode(decided: Deciding) -> None:
    job, make = delayed_job(micro_batch=4), delayed_job
    async with devices(3) as household:

        async def kill() -> None:
            await household.mesh.kill("c")

        generations = await course(household, job, may_choose(3, replicas=False), 5, kill)
    plans = [event for event in household.events if isinstance(event, events.Plan)]
    assert [len(plan.stages) for plan in plans] == [3, 2]
    assert {plan.mode for plan in plans} == {decided.mode}
    assert decided.asked == 1
    if decided.mode is PlanMode.ASYNC:
        generations.assert_by_formula(job, make, STASHED, STEPS)
    else:
        assert_undisturbed(household, job, by_plain_torch(make(micro_batch=4), STEPS))


async def test_a_holder_that_is_started_again_does_not_ask_again(
    decided: Deciding, tmp_path: Path
) -> None:
    chosen = may_choose(3)
    async with devices(3) as household:
        process = Process(household, tmp_path, delayed_job(micro_batch=4), chosen)
        process.at_step(6)
        await process.ended()
        await household.until_waiting("b", "c")
        await household.restart("a")
        job = delayed_job(micro_batch=4)
        await household.holder_run(job, chosen, folder=process.left).run()
    plans = [event for event in household.events if isinstance(event, events.Plan)]
    assert len(plans) > 1
    assert {plan.mode for plan in plans} == {decided.mode}
    assert decided.asked == 1
    if decided.mode is PlanMode.SYNC:
        wanted = by_plain_torch(delayed_job(micro_batch=4), STEPS)
        assert_same_weights(job, wanted)


async def test_a_private_job_may_choose_too(decided: Deciding) -> None:
    job = delayed_job(micro_batch=4)
    async with devices(3) as household:
        await household.holder_run(job, may_choose(3, private=True)).run()
    wanted = {
        PlanMode.ASYNC: lambda: by_formula(delayed_job(), cut_of(household), STASHED, STEPS),
        PlanMode.SYNC: lambda: by_plain_torch(delayed_job(micro_batch=4), STEPS),
    }
    assert_undisturbed(household, job, wanted[decided.mode]())


async def test_a_job_that_needs_the_barrier_keeps_it_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_cluster, "choose_mode", Deciding(PlanMode.ASYNC))
    job = delayed_job(micro_batch=4, clip_grad_norm=1.0)
    async with devices(2) as household:
        await household.holder_run(job, may_choose(2)).run()
    wanted = by_plain_torch(delayed_job(micro_batch=4, clip_grad_norm=1.0), STEPS)
    assert_undisturbed(household, job, wanted)
    assert household.plan.mode == "sync"
    assert _warnings(household, lambda line: "clip_grad_norm" in line)


async def test_what_only_misleads_is_never_chosen() -> None:
    with pytest.raises(OptionError, match="not with mode auto"):
        options(2, AsyncOptions(Weights.UNSTASHED), 1, mode="auto")


def _warnings(household: Devices, wanted: Callable[[str], bool]) -> list[str]:
    told = [event.message for event in household.events if isinstance(event, events.Warning)]
    return [line for line in told if wanted(line)]
