"""The user's own plan is trained by, as long as its devices are here."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from p2ptrain import events
from p2ptrain.errors import OptionError, PlanError
from p2ptrain.events import Done, Event, Failure, Step
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from tests.integration.training.household import devices
from tests.integration.training.jobs import STEPS, assert_undisturbed, momentum_job, undisturbed
from tests.integration.training.test_recovery_holder import again, killed


def plan_file(
    folder: Path, *stages: tuple[int, int, str], micro_batch: int, planner: str = "by hand"
) -> Path:
    """A straight pipeline, written by hand: it predicts nothing."""
    job = momentum_job()
    content = {
        "format": "p2ptrain.plan/1",
        "planner": planner,
        "micro_batch": micro_batch,
        "micro_batches": -(-job.batch_size // micro_batch),
        "stages": [
            {"units": [first, end], "devices": [{"name": name, "share": micro_batch}], "warmup": 1}
            for first, end, name in stages
        ],
    }
    file = folder / "plan.json"
    file.write_text(json.dumps(content))
    return file


def units_of(plan: events.Plan) -> list[tuple[tuple[int, int], list[str]]]:
    return [(stage.units, [device.name for device in stage.devices]) for stage in plan.stages]


async def measured(folder: Path) -> int:
    """How many units the job's model has; a dry run says it."""
    async with devices(1) as household:
        options = TrainOptions(dry_run=True, write_profile=folder / "profile.json")
        await household.holder_run(momentum_job(), options, household.events.append).run()
    content = json.loads((folder / "profile.json").read_text())
    return len(Profile.from_json(content).units)


async def test_it_is_obeyed_and_a_death_is_planned_around(tmp_path: Path) -> None:
    units = await measured(tmp_path)
    size = momentum_job().fixed_micro_batch
    stages = (0, 1, "c"), (1, units - 1, "a"), (units - 1, units, "b")
    file = plan_file(tmp_path, *stages, micro_batch=size, planner="pp")  # no group after the death
    wanted, job = undisturbed(momentum_job()), momentum_job()
    killing: list[asyncio.Task[None]] = []
    async with devices(3) as household:

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step) and event.step == 5:
                killing.append(asyncio.create_task(household.mesh.kill("b")))

        await household.holder_run(job, TrainOptions(plan=file, steps=STEPS), listen).run()
        await asyncio.gather(*killing)
        assert_undisturbed(household, job, wanted)
        first, *others = [e for e in household.events if isinstance(e, events.Plan)]
        assert units_of(first) == [((begin, end), [name]) for begin, end, name in stages]
        assert [plan.reason for plan in others] == ["failure"]
        assert "b" not in {name for _, names in units_of(others[0]) for name in names}
        assert [e.name for e in household.events if isinstance(e, Failure)] == ["b"]


async def test_a_plan_with_another_device_or_for_another_model_ends_the_job(
    tmp_path: Path,
) -> None:
    units = await measured(tmp_path)
    size = momentum_job().fixed_micro_batch
    for stages, message in (
        (((0, 1, "a"), (1, units, "tv")), r'the plan uses "tv", which is not among .* a, b'),
        (((0, 1, "a"), (1, units + 3, "b")), f"for a model of {units + 3} layers, and this one"),
    ):
        file = plan_file(tmp_path, *stages, micro_batch=size)
        async with devices(2) as household:
            run = household.holder_run(
                momentum_job(), TrainOptions(plan=file), household.events.append
            )
            with pytest.raises(PlanError, match=message):
                await run.run()
            assert not [e for e in household.events if isinstance(e, Step | events.Plan)]


async def test_other_micro_batches_than_the_job_s_are_refused_at_once(tmp_path: Path) -> None:
    job = momentum_job()
    file = plan_file(tmp_path, (0, 1, "a"), micro_batch=job.fixed_micro_batch + 1)
    async with devices(1) as household:
        with pytest.raises(OptionError, match="leave micro_batch out of the job"):
            await household.holder_run(job, TrainOptions(plan=file), household.events.append).run()


async def test_a_dry_run_writes_what_planners_read_and_trains_nothing(tmp_path: Path) -> None:
    job = momentum_job()
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    profile, cluster, plan = (tmp_path / f"{name}.json" for name in ("p", "c", "plan"))
    options = TrainOptions(
        dry_run=True, write_profile=profile, write_cluster=cluster, write_plan=plan, wait_for=3
    )
    async with devices(3) as household:
        await household.holder_run(job, options, household.events.append).run()
        for name in household.names:
            await household.until_idle(name)
        (event,) = [e for e in household.events if isinstance(e, events.Plan)]
        assert not [e for e in household.events if isinstance(e, Step | Done)]
        made = Plan.from_json(json.loads(plan.read_text()))
        assert units_of(event) == [
            (stage.units, [device.name for device in stage.devices]) for stage in made.stages
        ]
        read = Cluster.from_json(json.loads(cluster.read_text()))
        assert [device.name for device in read.devices] == ["a", "b", "c"]
        assert read.holder.name == "a"
        assert read.default_link is not None  # for a device that is written in by hand
        assert all(device.times is not None and device.memory_bytes for device in read.devices)
        model = Profile.from_json(json.loads(profile.read_text()))
        assert model.times.unit_count == made.stages[-1].units[1]
        assert all(value.equal(before[name]) for name, value in job.model.state_dict().items())


async def test_a_holder_that_is_started_again_goes_on_by_the_plan(tmp_path: Path) -> None:
    units = await measured(tmp_path)
    size = momentum_job().fixed_micro_batch
    stages = (0, 1, "c"), (1, units - 1, "a"), (units - 1, units, "b")
    file = plan_file(tmp_path, *stages, micro_batch=size, planner="pp")
    options = TrainOptions(plan=file, steps=STEPS)
    wanted = undisturbed(momentum_job())
    async with devices(3) as household:
        process = await killed(household, tmp_path, 5, momentum_job(), options)
        other = (0, 2, "b"), (2, units, "a")
        plan_file(tmp_path, *other, micro_batch=size, planner="pp")
        job = momentum_job()
        await again(household, process, job, options)
        assert_undisturbed(household, job, wanted)
        first, *later = [e for e in household.events if isinstance(e, events.Plan)]
        assert units_of(first) == [((begin, end), [name]) for begin, end, name in stages]
        assert [units_of(plan) for plan in later] == [
            [((begin, end), [name]) for begin, end, name in other]
        ]
