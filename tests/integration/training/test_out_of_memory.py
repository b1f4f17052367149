"""Devices that have less memory than they said: planned for again, with the same result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from p2ptrain import events
from p2ptrain.coordinator import plan_cluster
from p2ptrain.errors import DeviceLost, PeerError, PlanError
from p2ptrain.events import Failure, Plan, Step
from p2ptrain.holder.input.checked_dataset import CheckedDataset
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.assignment import Assignment
from p2ptrain.model.stage.stage import Stage
from p2ptrain.net.message import Message
from p2ptrain.plan.types.memory_budgets import MemoryBudgets, MemoryShortage
from p2ptrain.recovery.recovery_settings import RecoverySettings
from p2ptrain.runtime import stage_sender
from p2ptrain.runtime.allreduce import RingAllReduce
from p2ptrain.runtime.io.tensor_receiver import TensorReceiver
from p2ptrain.runtime.reduced_tensors import ReducedTensors
from p2ptrain.runtime.tiled.tiled_executor import TileExchange
from p2ptrain.state.fetch import fetch_units as fetch_state
from p2ptrain.worker import generation_builder, job_memory
from p2ptrain.worker.job_memory import JobMemory
from p2ptrain.worker.session import WorkerSession
from tests.integration.training.group_plans import Stage as GroupStage
from tests.integration.training.group_plans import dealt, device_count, divided, force
from tests.integration.training.group_plans import plan as forced_plan
from tests.integration.training.household import NO_FIRST_WEIGHTS, Devices, devices
from tests.integration.training.jobs import make_job, on_step, undisturbed

SAME_MEMORY = RecoverySettings(less_memory_share=1.0)
"""For plans that can become no smaller."""


def failing_forward(fails: Callable[[], bool], *, everywhere: bool = True) -> Callable[..., Any]:
    """`Stage.forward`, out of memory in training (not in profiles) while `fails` says so.

    Where not `everywhere`, only the first stage is asked: which one's second forward comes first is
    chance.
    """
    forward = Stage.forward

    def run(self: Stage, *args: Any, **kwargs: Any) -> Any:
        compares = "seed" in kwargs and kwargs["seed"] is None
        if not compares and "seed" in kwargs and (everywhere or self.first == 0) and fails():
            raise MemoryError
        return forward(self, *args, **kwargs)

    return run


async def _losses(household: Devices, planner: str = "pp") -> list[float]:
    options = TrainOptions(wait_for=len(household.names), planner=planner, steps=3)
    await household.holder_run(make_job(), options).run()
    return household.losses


def assert_warned(household: Devices, why: str) -> None:
    """Once of this, and else only of what has no room for copies."""
    warning, *uncopied = (e.message for e in household.events if isinstance(e, events.Warning))
    assert why in warning
    assert all("has no copy, for lack of memory" in line for line in uncopied)


async def test_out_of_memory_in_the_first_round_is_planned_again_from_the_same_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = undisturbed(make_job(), 3).losses
    attempts = iter([False, True])
    fails = failing_forward(lambda: next(attempts, False), everywhere=False)
    monkeypatch.setattr(Stage, "forward", fails)
    async with devices(2) as household:
        assert await _losses(household) == wanted
        first, second = (e for e in household.events if isinstance(e, Plan))
    assert (first.reason, second.reason) == ("start", "failure")
    assert second.epoch > first.epoch
    assert [e.step for e in household.events if isinstance(e, Step)] == [1, 2, 3]
    assert_warned(household, "ran out of memory in the first round")


async def test_a_device_that_never_has_enough_ends_the_job_with_a_plain_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Stage, "forward", failing_forward(lambda: True))
    async with devices(1) as household:
        with pytest.raises(PlanError, match=r"the model needs .* missing"):
            await _losses(household, "single")


async def test_out_of_memory_later_is_planned_around_too(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = undisturbed(make_job(), 3).losses
    failures = 0

    def fill() -> None:
        nonlocal failures
        failures = 1

    def fails() -> bool:
        nonlocal failures
        failures -= 1
        return failures == 0

    monkeypatch.setattr(Stage, "forward", failing_forward(fails))
    async with devices(2) as household:
        options = TrainOptions(wait_for=2, planner="pp", steps=3)
        await household.holder_run(make_job(), options, on_step(household, 1, fill)).run()
        assert household.losses == wanted
    assert_warned(household, "ran out of memory after step")


async def test_memory_that_is_gone_when_a_part_is_handed_out_is_planned_around(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between profile and preparation something else took it."""
    left = iter([0])
    monkeypatch.setattr(job_memory, "available_memory_bytes", lambda: next(left, 1 << 30))
    monkeypatch.setattr(job_memory, "usable_memory_bytes", lambda: 1 << 30)
    async with devices(2, memory_bytes=None) as household:
        assert len(await _losses(household)) == 3
        assert household.plan.reason == "start"
        assert household.plan.epoch == 2, "the first plan was not carried out"


async def test_a_stage_that_is_larger_than_its_plan_says_is_neither_fetched_nor_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device is planned around, as one without memory; this planner leaves nobody out."""
    prepare, fetched = WorkerSession.prepare, set[str]()

    async def lied_to(
        self: WorkerSession, peer: str, assignment: Assignment, message: Message
    ) -> Message:
        lie = replace(message, fields={**message.fields, "needed": {"compute_bytes": 1}})
        return await prepare(self, peer, assignment, lie)

    def short_of(self: JobMemory, needed: MemoryBudgets, *, engaged: bool) -> MemoryShortage | None:
        has = MemoryBudgets(1000 if self is tight.measures.memory else 1 << 40)
        return has.shortage(needed)

    async def fetch(mesh: Mesh, *args: Any) -> Any:
        fetched.add(mesh.name)
        return await fetch_state(mesh, *args)

    monkeypatch.setattr(WorkerSession, "prepare", lied_to)
    monkeypatch.setattr(JobMemory, "short_of", short_of)
    monkeypatch.setattr(generation_builder, "fetch_units", fetch)
    async with devices(3) as household:
        tight = household.members["c"].service
        with pytest.raises(PlanError, match="c has 0 bytes"):
            await _losses(household)
    assert "c" not in fetched


async def test_memory_that_others_have_taken_meanwhile_is_not_handed_out_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A link breaks; the same plan would do, but one device has less than it offered by now."""
    wanted = undisturbed(make_job(epochs=4)).losses
    real, asked = JobMemory.short_of, list[MemoryBudgets]()

    def short_of(self: JobMemory, needed: MemoryBudgets, *, engaged: bool) -> MemoryShortage | None:
        if engaged:
            asked.append(needed)
        if len(asked) == 1:
            return MemoryShortage(MemoryBudgets(800 << 20))
        return real(self, needed, engaged=engaged)

    monkeypatch.setattr(JobMemory, "short_of", short_of)
    async with devices(2) as household:

        def cut() -> None:
            household.mesh.cut(household.mesh["a"], household.mesh["b"], "pulled")

        options = TrainOptions(wait_for=2, planner="pp", steps=12)
        listen = on_step(household, 3, cut)
        await household.holder_run(make_job(epochs=4), options, listen).run()
        assert household.losses == wanted
        assert len(asked) == 4, "both devices, for a plan that was given up and for the next"
        assert all(asked)


@pytest.mark.parametrize(("free_mib", "hint"), [(10, True), (500, False)])
async def test_a_device_that_is_gone_may_have_run_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, free_mib: int, hint: bool
) -> None:
    """The kernel kills without a word: what the device last said of its memory is all there is."""
    monkeypatch.setattr(stage_sender, "available_memory_bytes", lambda: free_mib << 20)
    async with devices(2, settings=NO_FIRST_WEIGHTS) as household:
        killing: list[asyncio.Task[None]] = []

        def kill() -> None:
            killing.append(asyncio.create_task(household.mesh.kill("b")))

        options = TrainOptions(wait_for=2, planner="pp", replicas=False)
        run = household.holder_run(make_job(epochs=500), options, on_step(household, 3, kill))
        with pytest.raises(DeviceLost, match="b is gone") as caught:
            await run.run()
        await asyncio.gather(*killing)
        assert caught.value.name == "b"
        warnings = [e.message for e in household.events if isinstance(e, events.Warning)]
        assert any("10.5 MB of its memory were free" in one for one in warnings) is hint
    told = str(caught.value)
    assert ("10.5 MB of its memory were free" in told) is hint
    assert (
        "ran out of memory, see `dmesg` there, and start it with a smaller --memory" in told or hint
    )
    assert "--memory" in told


async def test_a_device_that_says_good_bye_is_no_failure() -> None:
    async with devices(2) as household:
        leaving: list[asyncio.Task[None]] = []

        def leave() -> None:
            leaving.append(asyncio.create_task(household.mesh.leave("b")))

        options = TrainOptions(wait_for=2, planner="pp", steps=3)
        await household.holder_run(make_job(), options, on_step(household, 1, leave)).run()
        await asyncio.gather(*leaving)
        assert len(household.losses) == 3
    assert not [e for e in household.events if isinstance(e, (Failure, events.Warning))]


@pytest.mark.parametrize("plan", [[divided(2, 2)], [dealt(3, 1)], [divided(4), dealt(2, 2)]])
async def test_a_member_of_a_group_that_runs_out_of_memory_is_planned_for_again(
    monkeypatch: pytest.MonkeyPatch, plan: list[GroupStage]
) -> None:
    force(monkeypatch, plan)
    count = device_count(plan)
    async with devices(count, settings=SAME_MEMORY) as household:
        wanted = await _losses(household, "auto")
    attempts = iter([False, False, True])
    monkeypatch.setattr(Stage, "forward", failing_forward(lambda: next(attempts, False)))
    async with devices(count, settings=SAME_MEMORY) as household:
        assert await _losses(household, "auto") == wanted
        first, second = (e for e in household.events if isinstance(e, Plan))
        assert second.epoch > first.epoch


def fails_once(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: int = 0, flow: str = ""
) -> None:
    """No memory at one call of `owner.name`, `after` others; of receivers only those of `flow`."""
    calls = 0
    real = getattr(owner, name)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if flow in getattr(self, "_name", flow):
            calls += 1
            if calls == after + 1:
                raise MemoryError
        return real(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, run)


@pytest.mark.parametrize("method", ["open", "deliver"])
@pytest.mark.parametrize(
    ("flow", "who"), [("activations of stage 1", "b"), ("gradients of stage 0", "a")]
)
async def test_no_memory_for_what_arrives_is_planned_around_where_it_arrives(
    monkeypatch: pytest.MonkeyPatch, flow: str, who: str, method: str
) -> None:
    """The link stays: its other end is short of nothing."""
    wanted = undisturbed(make_job(), 3).losses
    fails_once(monkeypatch, TensorReceiver, method, 5, flow)
    async with devices(2) as household:
        assert await _losses(household) == wanted
    assert_warned(household, f"{who} ran out of memory")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(RingAllReduce, "open"), (RingAllReduce, "deliver"), (ReducedTensors, "unpack")],
)
async def test_no_memory_for_sums_of_a_group_is_planned_around(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    force(monkeypatch, [divided(2, 2)])
    async with devices(2, settings=SAME_MEMORY) as household:
        wanted = await _losses(household, "auto")
    fails_once(monkeypatch, owner, name)
    async with devices(2, settings=SAME_MEMORY) as household:
        assert await _losses(household, "auto") == wanted
    assert_warned(household, "ran out of memory")


async def test_no_memory_for_what_tiles_tell_each_other_is_planned_around(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with devices(2, settings=SAME_MEMORY) as household:
        wanted = await _tiled(household)
    fails_once(monkeypatch, TileExchange, "_room", 9)
    async with devices(2, settings=SAME_MEMORY) as household:
        assert await _tiled(household) == pytest.approx(wanted, abs=1e-5)
    assert_warned(household, "ran out of memory")


async def _tiled(household: Devices) -> list[float]:
    options = TrainOptions(wait_for=2, steps=3, planner="tiles")
    await household.holder_run(make_job("cnn"), options).run()
    return household.losses


class Filling(list[Any]):
    """A dataset whose samples need memory that is not there, once `lacks` says so."""

    lacks = 0

    def __getitem__(self, index: Any) -> Any:
        if self.lacks:
            self.lacks -= 1
            raise MemoryError
        return super().__getitem__(index)


@pytest.mark.parametrize("reading", [True, False])
async def test_no_memory_for_samples_is_planned_around(
    monkeypatch: pytest.MonkeyPatch, reading: bool
) -> None:
    """Of the device with the data; the script is not to blame."""
    wanted = undisturbed(make_job(epochs=4)).losses
    job = make_job(epochs=4)
    data = Filling(job.data)
    async with devices(2) as household:

        def fill() -> None:
            data.lacks = int(reading)
            if not reading:
                fails_once(monkeypatch, CheckedDataset, "_stack")

        options = TrainOptions(wait_for=2, planner="pp", steps=12)
        run = household.holder_run(replace(job, data=data), options, on_step(household, 1, fill))
        await run.run()
        assert household.losses == wanted
    assert_warned(household, "a ran out of memory after step")


async def test_samples_that_never_fit_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that has no stage: there is no plan that asks less of it."""
    monkeypatch.setattr(plan_cluster, "make_plan", partial(forced_plan, [divided(4)], names="b"))
    job = make_job(epochs=20)
    data = Filling(job.data)
    async with devices(2, settings=RecoverySettings(verdict_seconds=0.0)) as household:

        def fill() -> None:
            data.lacks = 1 << 30

        options = TrainOptions(wait_for=2, planner="auto", steps=50)
        run = household.holder_run(replace(job, data=data), options, on_step(household, 1, fill))
        with pytest.raises(PeerError, match="a ran out of memory"):
            await run.run()
