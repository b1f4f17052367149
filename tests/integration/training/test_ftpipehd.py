"""`--mode async --planner ftpipehd`: as published, and to the bit what the formula gives."""

from __future__ import annotations

import pytest
import torch

from p2ptrain.events import Event
from p2ptrain.job.asynchrony import AsyncOptions, FtpipehdOptions
from p2ptrain.recovery.recovery_settings import RecoverySettings
from tests.integration.training.delayed import Generations, delayed_job
from tests.integration.training.ftpipehd import Speeds, as_published, reasons, units
from tests.integration.training.household import devices, hold_rounds

INTERVALS = FtpipehdOptions(first_repartition=10, repartition=20)
STEPS = 60
STASHED = AsyncOptions()
SETTINGS = RecoverySettings(repartition_judged_share=0.0)
"""By the times that are made up every device fills its steps; real ones here take no time."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("how", [STASHED, AsyncOptions(aggregate=1)])
async def test_a_slow_device_is_found_after_ten_mini_batches(
    how: AsyncOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first cut is even: nothing is known of other devices; no step is made again later."""
    job = delayed_job()
    async with devices(3, settings=SETTINGS) as household:
        speeds, generations = Speeds({"c": 10.0}), Generations(household)
        hold_rounds(monkeypatch, STEPS - 20, lambda: "drift" in reasons(household))
        with speeds.in_place(), generations.watched():
            options = as_published(3, STEPS, INTERVALS, how)
            await household.holder_run(job, options).run()
        generations.assert_by_formula(job, delayed_job, how, STEPS)
        first, *later = units(household)
    assert speeds.profiled == 1, "of the device with the data alone"
    assert list(first) == ["a", "b", "c"], "the list's order"
    assert max(first.values()) - min(first.values()) <= 1
    assert all(plan["c"] == 1 for plan in later)
    assert reasons(household) == ["start", "drift"], "what does not pay does not change"
    assert all(version == told for version, told, _ in generations.begun), "at a border"
    assert generations.begun[1][0] >= INTERVALS.first_repartition


async def test_devices_that_change_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow one becomes fast, and the other one slow: found by the looks that come."""
    job, steps = delayed_job(), 120
    async with devices(2, settings=SETTINGS) as household:
        speeds, generations = Speeds({"b": 5.0}), Generations(household)
        hold_rounds(monkeypatch, steps - 20, lambda: len(generations.begun) > 2)

        def listen(event: Event) -> None:
            household.events.append(event)
            if len(generations.begun) == 2:
                speeds.factors = {"a": 5.0}

        with speeds.in_place(), generations.watched():
            await household.holder_run(job, as_published(2, steps, INTERVALS), listen).run()
        generations.assert_by_formula(job, delayed_job, STASHED, steps)
    _, second, third = units(household)[:3]
    assert second["b"] == third["a"] == 1


@pytest.mark.parametrize("replan", [True, False])
async def test_even_devices_keep_their_cuts_and_so_does_who_is_asked_to(replan: bool) -> None:
    job = delayed_job()
    async with devices(3, settings=SETTINGS) as household:
        speeds, generations = Speeds({} if replan else {"c": 10.0}), Generations(household)
        with speeds.in_place(), generations.watched():
            options = as_published(3, STEPS, INTERVALS, replan=replan)
            await household.holder_run(job, options).run()
        generations.assert_by_formula(job, delayed_job, STASHED, STEPS)
    assert reasons(household) == ["start"]


async def test_the_device_with_the_data_may_be_the_slow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its capacity counts like all others': the paper sets it to 1."""
    job = delayed_job()
    async with devices(2, settings=SETTINGS) as household:
        speeds, generations = Speeds({"a": 10.0}), Generations(household)
        hold_rounds(monkeypatch, STEPS - 20, lambda: "drift" in reasons(household))
        with speeds.in_place(), generations.watched():
            await household.holder_run(job, as_published(2, STEPS, INTERVALS)).run()
        generations.assert_by_formula(job, delayed_job, STASHED, STEPS)
    first, second = units(household)[:2]
    assert second["a"] == 1 < first["a"]
