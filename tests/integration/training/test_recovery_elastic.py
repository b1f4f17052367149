"""Devices leave, come and slow down while a job trains: nothing in the result shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from p2ptrain import events
from p2ptrain.coordinator import plan_cluster
from p2ptrain.coordinator import service as planning
from p2ptrain.coordinator.measured_cluster import MeasuredCluster
from p2ptrain.errors import PeerError, PlanError
from p2ptrain.events import Event, Failure, Recovered, Step
from p2ptrain.holder.planning import evaluate_replan
from p2ptrain.holder.planning.evaluate_replan import ReplanEvaluation
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.messages.round_orders import RoundReport
from p2ptrain.plan.replan.hysteresis import ReplanDecision
from p2ptrain.plan.types.plan import Plan
from p2ptrain.process import child_process
from p2ptrain.runtime.stage_sender import LiveStageSender
from p2ptrain.worker import device_profile
from tests.integration.training.household import Devices, devices, hold_rounds
from tests.integration.training.jobs import (
    assert_undisturbed,
    momentum_job,
    one_stage_each,
    undisturbed,
)
from tests.integration.training.made_up import SOON, UNIT_SECONDS, make_up_profiles
from tests.support.reference import Outcome

LONG = 40
MICRO_BATCHES = 4
PIPELINE = one_stage_each(3)


Happening = Callable[[], Coroutine[Any, Any, None]]


class Course:
    """What happens at which step, and with which version each generation began."""

    def __init__(self, household: Devices, at: Mapping[int, Happening]) -> None:
        self.begun: list[tuple[int, int]] = []  # version, first step reported after it
        self._household = household
        self._at = dict(at)
        self._happening: list[asyncio.Task[None]] = []

    async def train(self, job: Job, options: TrainOptions) -> None:
        await self._household.holder_run(job, options, self.listen).run()
        await asyncio.gather(*self._happening)

    def listen(self, event: Event) -> None:
        seen = self._household.events
        if isinstance(event, Step):
            if isinstance(seen[-1], events.Plan):
                hosted = self._household.members["a"].service.slot.hosted
                if hosted is not None:
                    self.begun.append((hosted.assignment.version.step, event.step))
            if event.step in self._at:
                self._happening.append(asyncio.create_task(self._at.pop(event.step)()))
        seen.append(event)


def assert_planned(household: Devices, job: Job, wanted: Outcome, reasons: Sequence[str]) -> None:
    """The generations began for these reasons; nothing else shows it, and nobody was lost."""
    assert_undisturbed(household, job, wanted)
    seen = household.events
    assert not [e for e in seen if isinstance(e, Failure | Recovered)]
    plans = [e for e in seen if isinstance(e, events.Plan)]
    assert [plan.reason for plan in plans] == list(reasons)
    assert [plan.epoch for plan in plans] == sorted({plan.epoch for plan in plans})


async def leave(household: Devices, name: str) -> None:
    """As a node leaves."""
    await household.members[name].hand_over(30.0)
    await household.members[name].close()
    await household.mesh.leave(name)


def used(household: Devices) -> set[str]:
    return {device.name for stage in household.plan.stages for device in stage.devices}


@pytest.fixture
def slowed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Profiles by which a unit is worth a device of its own, and rounds that take as long.

    Returns how many times as long they take on some devices, by id.
    """
    factors: dict[str, float] = {}

    report = LiveStageSender.report

    async def reported(links: LiveStageSender, said: RoundReport) -> None:
        place = links.place
        seconds = MICRO_BATCHES * (place.end - place.first) * sum(UNIT_SECONDS)
        wall = seconds * factors.get(links.shell.mesh.self_id, 1.0)
        await report(links, replace(said, busy_seconds=wall, cpu_seconds=seconds))

    make_up_profiles(monkeypatch)
    monkeypatch.setattr(LiveStageSender, "report", reported)
    # plans are found here: another process is begun in a second, in which all rounds may end
    monkeypatch.setattr(child_process, "_can_be_had", lambda: False)
    return factors


@pytest.mark.usefixtures("slowed")
async def test_who_leaves_hands_its_work_over_and_no_step_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted, job = undisturbed(momentum_job()), momentum_job()
    async with devices(3, settings=SOON) as household:
        hold_rounds(monkeypatch, 10, lambda: household.plan.reason == "leave")
        course = Course(household, {5: partial(leave, household, "b")})
        await course.train(job, PIPELINE)
        assert_planned(household, job, wanted, ["start", "leave"])
        assert used(household) == {"a", "c"}
        assert ("b", "it is leaving") in [(o.name, o.reason) for o in household.plan.left_out]
        (_, (version, step)) = course.begun
        assert version == step - 1 >= 5
        assert household.members["b"].service.slot.idle.is_set()


@pytest.mark.usefixtures("slowed")
async def test_all_but_the_holder_may_leave_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who asks before another has left may be left out with it, by one plan: here none does."""
    wanted, job = undisturbed(momentum_job()), momentum_job()
    async with devices(3, settings=SOON) as household:

        async def leave_in_turn() -> None:
            for name in ("c", "b"):
                await leave(household, name)

        household.mesh.elect("c")  # whose work everybody waits for leaves too
        hold_rounds(monkeypatch, 10, lambda: used(household) == {"a"})
        course = Course(household, {3: leave_in_turn})
        await course.train(job, PIPELINE)
        assert_planned(household, job, wanted, ["start", "leave", "leave"])
        assert used(household) == {"a"}
        assert all(version == step - 1 for version, step in course.begun)


@pytest.mark.usefixtures("slowed")
@pytest.mark.parametrize("replan", [True, False])
async def test_who_comes_is_measured_while_training_goes_on_and_taken_in(
    monkeypatch: pytest.MonkeyPatch, replan: bool
) -> None:
    options = replace(PIPELINE, wait_for=2, replan=replan, steps=LONG)
    wanted, job = undisturbed(momentum_job(20), LONG), momentum_job(20)
    async with devices(2, settings=SOON) as household:

        async def join() -> None:
            await household.mesh.join("c")
            household.start("c")

        course = Course(household, {3: join})
        hold_rounds(monkeypatch, LONG - 10, lambda: household.plan.reason == "join")
        await course.train(job, options)
        assert_planned(household, job, wanted, ["start", "join"])
        assert used(household) == {"a", "b", "c"}
        (_, (version, step)) = course.begun
        assert version == step - 1 >= 4  # steps were made meanwhile
        for name in "abc":
            await household.until_idle(name)


@pytest.mark.usefixtures("slowed")
async def test_planner_pp_takes_in_who_comes_though_the_others_could_be_faster_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only auto leaves devices out. Here whatever has no part for the newcomer looks better."""
    options = replace(PIPELINE, wait_for=2, steps=LONG)
    wanted, job = undisturbed(momentum_job(20), LONG), momentum_job(20)
    plan = plan_cluster.replan_cluster

    def tempting(
        request: JobPlanRequest,
        around: MeasuredCluster,
        present: Plan,
        *rest: Any,
        on_all: bool,
        **named: Any,
    ) -> Plan:
        if on_all:
            return plan(request, around, present, *rest, on_all=True, **named)
        those = [c for c in around.candidates if c.name in present.device_names]
        found = plan_cluster.plan_cluster(request, replace(around, candidates=those))
        borders = [stage.units[1] for stage in found.stages]
        moved = replace(found.stages[0], units=(0, borders[0] - 1))
        other = replace(found.stages[1], units=(borders[0] - 1, borders[1]))
        return replace(
            found,
            stages=(moved, other),
            predicted=replace(found.predicted, round_seconds=1e-3),
        )

    monkeypatch.setattr(evaluate_replan, "replan_cluster", tempting)
    async with devices(2, settings=SOON) as household:

        async def join() -> None:
            await household.mesh.join("c")
            household.start("c")

        hold_rounds(monkeypatch, LONG - 10, lambda: household.plan.reason != "start")
        await Course(household, {3: join}).train(job, options)
        assert_planned(household, job, wanted, ["start", "join"])
        assert used(household) == {"a", "b", "c"}


@pytest.mark.usefixtures("slowed")
async def test_who_comes_before_the_holder_has_a_link_to_it_is_taken_in_as_soon_as_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = replace(PIPELINE, wait_for=2, replan=False, steps=LONG)
    wanted, job = undisturbed(momentum_job(20), LONG), momentum_job(20)
    in_sight: list[int] = []
    settings = replace(SOON, evaluation_retry_seconds=0.0)
    async with devices(2, settings=settings) as household:
        household.mesh.elect("b")
        look = ReplanEvaluation.answer

        async def answer(
            evaluation: ReplanEvaluation,
        ) -> tuple[ReplanDecision, frozenset[str]]:
            found, seen = await look(evaluation)
            in_sight.append(len(seen))
            household.mesh.heal_link("a", "c")
            return found, seen

        async def join() -> None:
            await household.mesh.join("c")
            household.mesh.cut_link("a", "c")
            household.start("c")

        monkeypatch.setattr(ReplanEvaluation, "answer", answer)
        hold_rounds(monkeypatch, LONG - 10, lambda: household.plan.reason == "join")
        await Course(household, {3: join}).train(job, options)
        assert_planned(household, job, wanted, ["start", "join"])
        assert used(household) == {"a", "b", "c"}
    assert in_sight[:2] == [2, 3]


@pytest.mark.usefixtures("slowed")
@pytest.mark.parametrize("alone", [False, True])
async def test_who_comes_while_another_dies_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """It is measured once the others train again; at once where they cannot without it."""
    options = replace(PIPELINE, steps=LONG)
    wanted, job = undisturbed(momentum_job(20), LONG), momentum_job(20)
    may_be_measured = asyncio.Event()
    made_up, plan = device_profile.measure, plan_cluster.replan_cluster
    async with devices(3, settings=SOON) as household:

        async def measured(*args: Any, **more: Any) -> Mapping[str, Any]:
            newcomer = household.members.get("d")
            if newcomer is not None and args[2] is newcomer.compute:
                await may_be_measured.wait()
            return await made_up(*args, **more)

        def short(
            request: JobPlanRequest, around: MeasuredCluster, *rest: Any, **named: Any
        ) -> Plan:
            if len(around.candidates) < 3:
                asyncio.run_coroutine_threadsafe(_set(may_be_measured), loop).result()
                raise PlanError("too little memory")
            return plan(request, around, *rest, **named)

        async def come_and_die() -> None:
            await household.mesh.join("d")
            household.start("d")
            await household.mesh.kill("c")

        def listen(event: Event) -> None:
            course.listen(event)
            if isinstance(event, Recovered):
                may_be_measured.set()

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(device_profile, "measure", measured)
        if alone:
            monkeypatch.setattr(planning, "replan_cluster", short)
        course = Course(household, {5: come_and_die})
        hold_rounds(monkeypatch, LONG - 10, lambda: "d" in used(household))
        await household.holder_run(job, options, listen).run()
        assert_undisturbed(household, job, wanted)
        plans = [e for e in household.events if isinstance(e, events.Plan)]
        assert [e.reason for e in plans] == ["start", "failure", *([] if alone else ["join"])]
        late = ("d", "it came while training stood still")
        assert (late in [(o.name, o.reason) for o in plans[1].left_out]) is not alone
        assert used(household) == {"a", "b", "d"}


async def _set(event: asyncio.Event) -> None:
    event.set()


@pytest.mark.parametrize("replan", [True, False])
async def test_a_device_that_slows_down_gets_less_to_do_unless_the_plan_is_to_stay(
    monkeypatch: pytest.MonkeyPatch, slowed: dict[str, float], replan: bool
) -> None:
    options = replace(PIPELINE, replan=replan, steps=LONG)
    wanted, job = undisturbed(momentum_job(20), LONG), momentum_job(20)
    async with devices(3, settings=SOON) as household:

        async def slow_down() -> None:
            slowed[household.mesh["b"].self_id] = 4.0

        if replan:
            hold_rounds(monkeypatch, 35, lambda: household.plan.reason == "drift")
        course = Course(household, {20: slow_down})
        await course.train(job, options)
        reasons = ["start", "drift"] if replan else ["start"]
        assert_planned(household, job, wanted, reasons)
        assert all(version == step - 1 for version, step in course.begun)
        first, *later = (e for e in household.events if isinstance(e, events.Plan))
        assert all(units_of(plan, "b") < units_of(first, "b") for plan in later)
        if replan:
            assert 20 < course.begun[-1][0] < 40


def units_of(plan: events.Plan, name: str) -> int:
    return sum(
        stage.units[1] - stage.units[0]
        for stage in plan.stages
        if name in {device.name for device in stage.devices}
    )


async def test_devices_that_do_what_the_plan_expects_keep_it(slowed: dict[str, float]) -> None:
    options = replace(PIPELINE, steps=LONG)
    wanted, job = undisturbed(momentum_job(20), LONG), momentum_job(20)
    async with devices(3, settings=SOON) as household:
        await Course(household, {}).train(job, options)
        assert_planned(household, job, wanted, ["start"])


@pytest.mark.usefixtures("slowed")
async def test_a_device_that_comes_back_empty_gets_its_work_again() -> None:
    options = replace(PIPELINE, steps=LONG)
    wanted, job = undisturbed(momentum_job(20), LONG), momentum_job(20)
    async with devices(3, settings=SOON) as household:

        async def restart() -> None:
            await household.mesh.kill("b")
            await household.restart("b")

        await Course(household, {5: restart}).train(job, options)
        assert_undisturbed(household, job, wanted)
        reasons = [e.reason for e in household.events if isinstance(e, events.Plan)]
        assert reasons[:2] == ["start", "failure"]
        assert reasons[2:] in (["join"], [])  # it may be back before the others have a new plan
        assert used(household) == {"a", "b", "c"}


@pytest.mark.usefixtures("slowed")
@pytest.mark.parametrize("looked", [True, False])
async def test_who_the_others_cannot_do_without_hears_so_and_training_goes_on_with_it(
    monkeypatch: pytest.MonkeyPatch, looked: bool
) -> None:
    """Found out while training continues, or, where that look fails, at a round's border."""
    plan = plan_cluster.replan_cluster

    def short(request: JobPlanRequest, around: MeasuredCluster, *rest: Any, **named: Any) -> Plan:
        if around.leaving:
            raise PlanError("too little memory")
        return plan(request, around, *rest, **named)

    async def fails(look: ReplanEvaluation) -> tuple[ReplanDecision, frozenset[str]]:
        raise PeerError("a device does not answer")

    monkeypatch.setattr(evaluate_replan, "replan_cluster", short)
    monkeypatch.setattr(planning, "replan_cluster", short)
    if not looked:
        monkeypatch.setattr(ReplanEvaluation, "answer", fails)
    wanted, job = undisturbed(momentum_job()), momentum_job()
    told: list[str] = []
    async with devices(3, settings=SOON) as household:
        service = household.members["b"].service

        async def stay() -> None:
            await service.slot.hand_over(20.0, told.append)
            assert service.slot.idle.is_set()  # the job has ended meanwhile

        hold_rounds(monkeypatch, 10, lambda: bool(told))
        await Course(household, {3: stay}).train(job, PIPELINE)
        assert_planned(household, job, wanted, ["start"] if looked else ["start", "leave"])
        assert "b" in used(household)
    [line] = told
    assert "cannot take over this device's work (too little memory" in line
