"""The device with the data dies and is started again: its job continues, and nothing shows it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from p2ptrain import events, failpoints
from p2ptrain.errors import OptionError, PeerError
from p2ptrain.events import Done, Eval, Event, Plan, Recovered, Step, Waiting
from p2ptrain.failpoints import Reached
from p2ptrain.holder.start import journal
from p2ptrain.holder.start.journal import JOB_FILE, Journal
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.interface import MemberChanged, MemberState, MeshEvent
from p2ptrain.messages.kinds import OVER, STATE_REPORT
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.net.fields import LARGE, limited
from p2ptrain.net.message import Message
from p2ptrain.state import ended_jobs
from p2ptrain.state.ended_jobs import ENDED_FILE
from p2ptrain.worker import job_slot
from tests.integration.training.household import Devices, LocalJob, devices
from tests.integration.training.jobs import (
    STEPS,
    assert_same_weights,
    assert_undisturbed,
    make_job,
    momentum_job,
    one_stage_each,
    steps_of,
    undisturbed,
)
from tests.support.memory_household import memory_id


class Process:
    """A holder's process that ends without a word, at a moment that a test chooses.

    What it had written by then is what the next one finds; what it does afterwards does not count.
    """

    def __init__(self, household: Devices, folder: Path, job: Job, options: TrainOptions) -> None:
        self.household = household
        self.folder = folder
        self.is_dead = asyncio.Event()
        self._act: Callable[[Event], None] = lambda _: None
        run = household.holder_run(job, options, self._listen, StateFolder(folder / "now"))
        self._running = asyncio.create_task(run.run())

    def at_step(self, step: int) -> None:
        """It ends when people have heard of `step`."""

        def act(event: Event) -> None:
            if isinstance(event, Step) and event.step == step:
                self.die()

        self._act = act

    def at_warning(self, words: str) -> None:
        """It ends as people hear a warning with these words."""

        def act(event: Event) -> None:
            if isinstance(event, events.Warning) and words in event.message:
                self.die()

        self._act = act

    def at(self, name: str, **where: int) -> None:
        """It ends at a failpoint."""

        def act(_: Reached) -> asyncio.Future[None]:
            self.die()
            return asyncio.get_running_loop().create_future()

        failpoints.arm(name, act, device=memory_id("a"), **where)

    def die(self) -> None:
        """Now."""
        self._act = lambda _: None
        shutil.copytree(self.folder / "now", self.folder / "left")
        self.is_dead.set()

    def _listen(self, event: Event) -> None:
        if not self.is_dead.is_set():
            self.household.events.append(event)
            self._act(event)

    async def ended(self) -> None:
        """Wait for its end; the others have noticed."""
        dying = asyncio.create_task(self.is_dead.wait())
        await asyncio.wait([dying, self._running], return_when=asyncio.FIRST_COMPLETED)
        assert self.is_dead.is_set(), self._running.exception()
        await self.household.mesh.kill("a")
        self._running.cancel()
        await asyncio.wait([self._running])

    @property
    def left(self) -> StateFolder:
        """The folder that the next process finds."""
        return StateFolder(self.folder / "left")


async def killed(
    household: Devices,
    folder: Path,
    step: int,
    job: Job | None = None,
    options: TrainOptions | None = None,
) -> Process:
    """The holder's process, which has ended as people heard of `step`."""
    options = options or one_stage_each(len(household.names))
    process = Process(household, folder, job or momentum_job(), options)
    process.at_step(step)
    await process.ended()
    return process


async def again(household: Devices, process: Process, job: Job, options: TrainOptions) -> None:
    """The device comes back, and `train` is started again in its folder."""
    await household.restart("a")
    await household.holder_run(job, options, folder=process.left).run()


@pytest.mark.parametrize("step", [1, 5, STEPS])
async def test_a_killed_holder_goes_on_where_it_was_bit_by_bit(tmp_path: Path, step: int) -> None:
    wanted = undisturbed(momentum_job())
    options = one_stage_each(3)
    async with devices(3) as household:
        process = await killed(household, tmp_path, step, momentum_job(), options)
        await household.until_waiting("b", "c")
        assert sorted(household.waiting) == [("b", "a"), ("c", "a")]
        job = momentum_job()
        await again(household, process, job, options)
        assert_undisturbed(household, job, wanted)
        first, *later = [event for event in household.events if isinstance(event, Plan)]
        assert {plan.reason for plan in later} == {"failure"}
        assert all(plan.epoch > first.epoch for plan in later)
        assert isinstance(household.events[-1], Done)
        if step < STEPS:
            assert len([e for e in household.events if isinstance(e, Recovered)]) == 1
        assert not [e for e in household.events if isinstance(e, Waiting)]
        left = {file.name for file in process.left.path.iterdir()}
        assert left == {ENDED_FILE, "last_job.json"}
        for name in ("b", "c"):
            await household.until_idle(name)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("decide.before", {"step": 5}),
        ("report.after", {"step": 5}),
        ("commit.send.between", {"step": 5}),
        ("begin.send.between", {}),
        ("replay.first", {}),
        ("home.between", {}),
    ],
)
async def test_a_holder_killed_at_any_moment_tells_every_step_once(
    tmp_path: Path, name: str, where: dict[str, int]
) -> None:
    wanted = undisturbed(momentum_job())
    options = one_stage_each(3)
    async with devices(3) as household:
        process = Process(household, tmp_path, momentum_job(), options)
        process.at(name, **where)
        await process.ended()
        failpoints.disarm()
        job = momentum_job()
        await again(household, process, job, options)
        assert_undisturbed(household, job, wanted)


async def test_a_step_written_down_and_not_reported_stays_the_only_one_missing(
    tmp_path: Path,
) -> None:
    wanted = undisturbed(momentum_job())
    async with devices(3) as household:
        process = Process(household, tmp_path, momentum_job(), one_stage_each(3))
        process.at("journal.after", step=5)
        await process.ended()
        failpoints.disarm()
        job = momentum_job()
        await again(household, process, job, one_stage_each(3))
        assert steps_of(household) == [step for step in range(1, STEPS + 1) if step != 6]
        assert household.losses == wanted.losses[:5] + wanted.losses[6:]
    assert_same_weights(job, wanted)


async def test_a_power_cut_may_lose_what_was_written_down_of_the_last_steps(
    tmp_path: Path,
) -> None:
    """The others have them: it goes on from there, and what led there is not reported twice."""
    wanted = undisturbed(momentum_job())
    async with devices(3) as household:
        process = await killed(household, tmp_path, 9)
        entry = journal.find_journal(process.left, lambda _: None)
        assert entry is not None
        older = replace(entry, reported=replace(entry.reported, step=5))
        written = Journal(process.left, older, lambda _: None)
        await written.begun(older.noted, older.in_force)
        job = momentum_job()
        await again(household, process, job, one_stage_each(3))
        [recovered] = [event for event in household.events if isinstance(event, Recovered)]
        known, steps = max(recovered.version, older.reported.step), steps_of(household)
        assert steps == [*range(1, 10), *range(known + 1, STEPS + 1)]
        assert household.losses == [wanted.losses[step - 1] for step in steps]
        assert_same_weights(job, wanted)


async def test_a_holder_that_starts_from_other_weights_takes_those_of_the_others(
    tmp_path: Path,
) -> None:
    """What it had itself is nowhere else: it says so."""
    options = replace(one_stage_each(3), replicas=False)
    async with devices(3) as household:
        process = await killed(household, tmp_path, 5, momentum_job(), options)
        job = momentum_job()
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.add_(1.0)
        await household.restart("a")
        run = household.holder_run(job, options, folder=process.left)
        with pytest.raises(PeerError, match="what a had was lost when p2ptrain last stopped there"):
            await run.run()
        for name in ("b", "c"):
            await household.until_idle(name)


@pytest.mark.parametrize("where", ["answer.before", "accept.before", "backward.receive.after"])
async def test_a_holder_killed_before_its_first_step_starts_over_from_the_weights_drawn_now(
    tmp_path: Path, where: str
) -> None:
    """The others have parts of those drawn then, and the rest of them is nowhere."""
    options = one_stage_each(3)
    async with devices(3) as household:
        process = Process(household, tmp_path, momentum_job(), options)
        process.at(where)
        await process.ended()
        failpoints.disarm()
        jobs = [momentum_job(), momentum_job()]
        for job in jobs:
            with torch.no_grad():
                for parameter in job.model.parameters():
                    parameter.add_(0.1)
        await again(household, process, jobs[0], options)
        assert_undisturbed(household, jobs[0], undisturbed(jobs[1]))
        assert not [event for event in household.events if isinstance(event, events.Warning)]
        for name in ("b", "c"):
            await household.until_idle(name)


async def test_what_a_holder_had_itself_is_kept_by_its_neighbour(tmp_path: Path) -> None:
    """Its own first weights are of no use: another process has drawn others."""
    wanted = undisturbed(momentum_job())
    async with devices(3) as household:
        process = await killed(household, tmp_path, 9)
        job = momentum_job()
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.add_(1.0)
        await again(household, process, job, one_stage_each(3))
        assert_undisturbed(household, job, wanted)


async def test_what_was_evaluated_is_not_reported_again(tmp_path: Path) -> None:
    def job() -> Job:
        return make_job("cnn", eval_data=make_job("cnn").data, epochs=3)

    options = TrainOptions(wait_for=2, planner="pp")
    async with devices(2) as household:
        process = await killed(household, tmp_path, 4, job(), options)
        await again(household, process, job(), options)
        assert steps_of(household) == list(range(1, 10))
        told = [event.step for event in household.events if isinstance(event, Eval)]
        assert told == [3, 6, 9], "one an epoch"


async def test_fresh_starts_over(tmp_path: Path) -> None:
    async with devices(2) as household:
        process = await killed(household, tmp_path, 3)
        fresh = TrainOptions(wait_for=2, planner="pp", steps=STEPS, fresh=True)
        await again(household, process, momentum_job(), fresh)
        assert steps_of(household) == [1, 2, 3, *range(1, STEPS + 1)]
        await household.until_idle("b")


async def test_another_job_of_the_same_device_takes_the_place_at_once(tmp_path: Path) -> None:
    async with devices(2) as household:
        process = await killed(household, tmp_path, 3)
        await again(household, process, make_job("cnn"), TrainOptions(wait_for=2, planner="pp"))
        assert steps_of(household) == [1, 2, 3, *range(1, 7)]
        [warning] = [e.message for e in household.events if isinstance(e, events.Warning)]
        assert "is dropped" in warning


async def test_without_the_journal_it_is_refused_and_nobody_loses_anything(tmp_path: Path) -> None:
    async with devices(2) as household:
        process = await killed(household, tmp_path, 3)
        left = process.left.read(JOB_FILE)
        assert left is not None
        process.left.remove(JOB_FILE)
        with pytest.raises(OptionError, match="have this training up to step"):
            await again(household, process, momentum_job(), one_stage_each(2))
        alone: list[Event] = []  # asks nobody for anything, and ends nothing
        local = replace(one_stage_each(2), wait_for=1, local=True)
        await household.holder_run(momentum_job(), local, alone.append).run()
        assert isinstance(alone[-1], Done)
        process.left.write(JOB_FILE, left)
        await household.holder_run(momentum_job(), one_stage_each(2), folder=process.left).run()
        assert steps_of(household) == list(range(1, STEPS + 1))


async def test_members_without_anything_let_it_start_over(tmp_path: Path) -> None:
    async with devices(2) as household:
        process = await killed(household, tmp_path, 3)
        await household.mesh.kill("b")
        await household.restart("b")
        await again(household, process, momentum_job(), one_stage_each(2))
        assert steps_of(household) == [1, 2, 3, *range(1, STEPS + 1)]


async def test_a_member_of_another_process_in_its_place_ends_nothing(tmp_path: Path) -> None:
    """A `join` in the same state folder runs between the two, and steps aside with a good-bye."""
    wanted = undisturbed(momentum_job())
    async with devices(3) as household:
        process = await killed(household, tmp_path, 5)
        await household.until_waiting("b", "c")
        await household.restart("a")
        await household.mesh.leave("a")
        job = momentum_job()
        await again(household, process, job, one_stage_each(3))
        assert_undisturbed(household, job, wanted)
        assert len(household.waiting) == 2


async def test_who_waits_for_a_job_that_has_ended_hears_so_from_any_process_of_its_device(
    tmp_path: Path,
) -> None:
    """It was asleep when the job ended: nobody would go on with what it keeps."""
    async with devices(3) as household:
        process = await killed(household, tmp_path, 5)
        await household.until_waiting("b", "c")
        orphaned = household.members["b"].service.slot.orphaned
        assert orphaned is not None
        await household.restart("a", process.left)
        question = Message(OVER, {"job": orphaned[1]})
        reply = await household.mesh["b"].call(orphaned[0], question, timeout_seconds=10.0)
        assert reply.fields == {"over": False}
        assert household.members["b"].service.slot.orphaned == orphaned
        ended_jobs.note_ended(process.left, {orphaned[1]})
        household.mesh.cut(household.mesh["a"], household.mesh["b"], "a link comes anew")
        await household.until_idle("b")
        await household.mesh.kill("a")
        await household.restart("a", process.left)
        await household.until_idle("c")
        options = one_stage_each(3)
        await household.holder_run(momentum_job(), options, folder=process.left).run()
        assert steps_of(household) == [*range(1, 6), *range(1, STEPS + 1)]


def run_of_b(household: Devices, job: Job) -> LocalJob:
    """Another device's job."""
    options = TrainOptions(wait_for=2, planner="pp")
    return LocalJob(household.members["b"], job, options, lambda _: None)


async def test_waiting_devices_refuse_others_until_they_have_waited_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with devices(3) as household:
        await killed(household, tmp_path, 3)
        await household.until_waiting("b", "c")
        assert household.members["b"].service.slot.waiting_for == "a"
        with pytest.raises(OptionError, match="computing for a's training"):
            await run_of_b(household, make_job(epochs=1)).run()
        monkeypatch.setattr(job_slot, "MIN_PARK_SECONDS", 0.0)
        job = make_job(epochs=1)
        await run_of_b(household, job).run()
        await household.until_idle("c")


async def test_nobody_waits_for_a_holder_that_was_removed_from_the_household(
    tmp_path: Path,
) -> None:
    async with devices(3) as household:
        await killed(household, tmp_path, 3)
        await household.until_waiting("b", "c")
        for name in ("b", "c"):
            del household.mesh[name].seen[memory_id("a")]
        await run_of_b(household, make_job(epochs=1)).run()
        await household.until_idle("c")


async def test_who_waits_for_a_removed_holder_still_calls_it_by_its_name(tmp_path: Path) -> None:
    """It is a member no more when people hear of it."""
    async with devices(2) as household:
        mesh, service = household.mesh["b"], household.members["b"].service

        def forget(event: MeshEvent) -> None:
            if isinstance(event, MemberChanged) and event.member.state is MemberState.DEAD:
                del mesh.seen[event.member.id]

        mesh.subscribe(forget)
        await killed(household, tmp_path, 3)
        await household.until_waiting("b")
        assert memory_id("a") not in mesh.members
        assert household.waiting == [("b", "a")]
        assert service.slot.waiting_for == "a"


async def test_a_word_of_another_device_ends_no_wait_for_a_holder(tmp_path: Path) -> None:
    """Not even of the coordinator."""
    async with devices(3) as household:
        await killed(household, tmp_path, 3)
        await household.until_waiting("b", "c")
        await household.restart("a")
        await household.mesh.leave("a")
        household.mesh.elect("c")
        service = household.members["b"].service
        hosted, orphaned = service.slot.hosted, service.slot.orphaned
        assert hosted is not None
        assert orphaned is not None
        assignment = hosted.assignment
        fields = {
            **GenerationKey(orphaned[1], assignment.key.generation + 1).fields(),
            "digest": assignment.digest,
            "alive": [memory_id(name) for name in "bc"],
        }
        with pytest.raises(PeerError, match="another device's"):
            await household.mesh["c"].call(
                memory_id("b"),
                Message(STATE_REPORT, fields),
                timeout_seconds=10.0,
                reply_parts=limited(LARGE.most_bytes),
            )
        assert service.slot.orphaned == orphaned


async def test_a_process_that_asks_and_does_not_go_on_ends_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while it is a member nor when it leaves: the ten minutes go on."""
    async with devices(3) as household:
        process = await killed(household, tmp_path, 3)
        await household.until_waiting("b", "c")
        services = [household.members[name].service for name in ("b", "c")]
        orphaned = [service.slot.orphaned for service in services]
        process.left.remove(JOB_FILE)
        with pytest.raises(OptionError, match="have this training up to step"):
            await again(household, process, momentum_job(), one_stage_each(3))
        assert [service.slot.orphaned for service in services] == orphaned
        await household.mesh.leave("a")
        assert [service.slot.orphaned for service in services] == orphaned
        monkeypatch.setattr(job_slot, "MIN_PARK_SECONDS", 0.0)
        await run_of_b(household, make_job(epochs=1)).run()
        await household.until_idle("c")
