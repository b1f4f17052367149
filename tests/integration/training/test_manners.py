"""A device pauses for its person and comes back: nothing in the result shows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from p2ptrain import events
from p2ptrain.api.manners_keeper import KeeperSettings, MannersKeeper
from p2ptrain.errors import UserError
from p2ptrain.events import Condition, Event
from p2ptrain.holder.start.job_start import wait_for_members
from p2ptrain.manners.readings import DeviceReading
from p2ptrain.manners.rules import USUAL_LIMITS, LatchTimes
from p2ptrain.manners.settings import Manners
from tests.integration.training.household import Devices, devices, hold_rounds
from tests.integration.training.jobs import momentum_job, one_stage_each, undisturbed
from tests.integration.training.made_up import SOON
from tests.integration.training.test_recovery_elastic import (
    Course,
    assert_planned,
    slowed,
    used,
)

__all__ = ["slowed"]

AT_ONCE = KeeperSettings(
    period_seconds=0.02,
    retry_seconds=0.05,
    limits=replace(USUAL_LIMITS, battery=LatchTimes(0.0, 0.0, most_doublings=0)),
)


class Laptop:
    """A device of the household whose cable the test holds.

    Attributes:
        sentences: what it has said of its condition.
    """

    def __init__(self, household: Devices, name: str) -> None:
        self.household, self.name = household, name
        self.reading = DeviceReading(on_battery=False)
        self.sentences: list[str] = []
        self._news = asyncio.Event()

    @asynccontextmanager
    async def mannerly(self, manners: Manners) -> AsyncIterator[None]:
        """Its keeper runs."""
        mesh, member = self.household.mesh[self.name], self.household.members[self.name]
        keeper = MannersKeeper(
            mesh, member, manners, lambda: self.reading, {}, self._hear, settings=AT_ONCE
        )
        task = asyncio.create_task(keeper.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    def _hear(self, event: Event) -> None:
        assert isinstance(event, Condition)
        self.sentences.append(event.sentence)
        self._news.set()

    async def says(self, sentence: str) -> None:
        """Wait until that is its condition."""
        while self.sentences[-1:] != [sentence]:
            self._news.clear()
            await self._news.wait()

    async def unplug(self) -> None:
        self.reading = DeviceReading(on_battery=True)

    async def plug_in(self) -> None:
        self.reading = DeviceReading(on_battery=False)


@pytest.mark.usefixtures("slowed")
async def test_a_device_on_battery_hands_its_work_over_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted, job = undisturbed(momentum_job()), momentum_job()
    async with devices(3, settings=SOON) as household:
        laptop = Laptop(household, "b")

        def reasons() -> list[str]:
            return [e.reason for e in household.events if isinstance(e, events.Plan)]

        hold_rounds(monkeypatch, 7, lambda: "leave" in reasons())
        hold_rounds(monkeypatch, 10, lambda: "join" in reasons())

        async def come_back() -> None:
            await laptop.says("paused: on battery")
            assert used(household) == {"a", "c"}
            assert household.members["b"].service.slot.idle.is_set()
            await laptop.plug_in()

        course = Course(household, {3: laptop.unplug, 8: come_back})
        async with laptop.mannerly(Manners(on_battery="pause")):
            await course.train(job, one_stage_each(3))
        assert_planned(household, job, wanted, ["start", "leave", "join"])
        assert used(household) == {"a", "b", "c"}
        assert laptop.sentences == [
            "slow: on battery; handing its work over",
            "paused: on battery",
            "",
        ]


@pytest.mark.usefixtures("slowed")
async def test_a_device_that_rests_is_left_out_of_plans_with_its_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted, job = undisturbed(momentum_job()), momentum_job()
    async with devices(3, settings=SOON) as household:
        laptop = Laptop(household, "b")
        await laptop.unplug()
        async with laptop.mannerly(Manners(on_battery="pause")):
            await laptop.says("paused: on battery")
            household.mesh.elect("b")  # it coordinates, and plans nothing: no one is to blame
            await wait_for_members(household.mesh["a"], 2, 0.0)
            with pytest.raises(UserError, match="only 2 are here"):
                await wait_for_members(household.mesh["a"], 3, 0.0)
            await Course(household, {}).train(job, one_stage_each(2))
        assert_planned(household, job, wanted, ["start"])
        left_out = [(out.name, out.reason) for out in household.plan.left_out]
        assert ("b", "paused: on battery") in left_out
        assert household.mesh.coordinator.name == "b"
        assert not household.warned


async def test_a_slow_device_computes_the_same_and_rests_between() -> None:
    wanted, job = undisturbed(momentum_job()), momentum_job()
    async with devices(2) as household:
        laptop = Laptop(household, "b")
        async with laptop.mannerly(Manners(max_cpu=0.5)):
            await household.holder_run(job, one_stage_each(2)).run()
            assert household.members["b"].compute.share == 0.5
        assert household.losses == wanted.losses
        assert laptop.sentences == ["slow: at most 50% of its processor"]


async def test_where_the_others_cannot_do_without_it_it_is_slow_and_says_so() -> None:
    async with devices(2) as household:
        laptop = Laptop(household, "b")
        member = household.members["b"]

        async def refused(_seconds: float) -> str:
            return "no plan fits without b"

        member.service.slot.ask_to_leave = refused  # type: ignore[method-assign]
        await laptop.unplug()
        async with laptop.mannerly(Manners(on_battery="pause")):
            await laptop.says("slow: on battery; the others cannot do without it")
            assert member.compute.share == USUAL_LIMITS.used_share
            await laptop.plug_in()
            await laptop.says("")
            assert member.compute.share == 1.0
