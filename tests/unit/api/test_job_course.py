"""The course of a job: small however long it is, and whole for who asks in pieces."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain import events
from p2ptrain.api.job_course import (
    EARLIER_MODELS,
    EARLIER_POINTS,
    CourseAsked,
    CourseKeeper,
    EarlierRuns,
    JobCourse,
    joined,
    known_of,
)
from p2ptrain.api.job_desk import JobDesk
from p2ptrain.api.progress import PROGRESS, JobLine
from p2ptrain.errors import PeerError, UserError
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.net.forms import write_form
from p2ptrain.net.message import Message
from p2ptrain.net.read_form import read_form
from tests.support.memory_household import MemoryHousehold
from tests.support.page_member import PLAN, step


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_what_is_asked_for_in_pieces_is_the_whole(bursts: list[int]) -> None:
    keeper = CourseKeeper("r", "laptop", "Net", None, limit=16)
    known: JobCourse | None = None
    made = 0
    for burst in bursts:
        for _ in range(burst):
            made += 1
            keeper.note(step(made), made / 10)
        answer = JobCourse.from_bytes(keeper.since(known_of(known), made / 10).to_bytes())
        known = joined(known, answer)
        assert known == keeper.since(CourseAsked(), made / 10)
        assert len(known.points) <= 16
        assert [p.step for p in known.points] == list(range(known.stride, made + 1, known.stride))
        assert known.last is not None
        assert known.last.step == made


def test_another_run_starts_over() -> None:
    keeper = CourseKeeper("r2", "laptop", "Net", None)
    keeper.note(step(7), 1.0)
    answer = keeper.since(CourseAsked("r1", 1, 90), 1.0)
    assert [p.step for p in answer.points] == [7]
    assert not answer.is_rest


@pytest.mark.parametrize(
    ("happened", "state", "message"),
    [
        ([], "starting", ""),
        ([PLAN, step(1)], "training", ""),
        ([step(1), events.Waiting("pi")], "waiting", "pi"),
        ([step(1), events.Waiting("pi"), step(2)], "training", ""),
        ([step(1), events.Paused("pi"), step(2)], "paused", "pi"),
        ([step(1), events.Paused("pi"), events.Resumed("pi")], "training", ""),
        ([step(1), events.Done(1, 1.0, 1.0, None)], "done", ""),
        ([step(1), events.Error("no memory")], "failed", "no memory"),
    ],
)
def test_the_state_follows_the_events(
    happened: list[events.Event], state: str, message: str
) -> None:
    keeper = CourseKeeper("r", "laptop", "Net", 10)
    for event in happened:
        keeper.note(event, 1.0)
    assert (keeper.course.state, keeper.course.message) == (state, message)
    keeper.stopped()
    assert keeper.course.state == (state if state in ("done", "failed") else "stopped")


def test_a_persons_pause_takes_no_time_of_the_training() -> None:
    keeper = CourseKeeper("r", "laptop", "Net", None)
    happened = [(step(1), 0.0), (events.Paused("pi"), 1.0), (step(2), 1.5)]
    happened += [(events.Resumed("pi"), 61.0), (step(3), 62.0)]
    for event, seconds in happened:
        keeper.note(event, seconds)
    course = keeper.since(CourseAsked(), 62.0)
    assert [point.seconds for point in course.points] == [0.0, 1.0, 2.0]


def test_what_is_no_number_is_left_out() -> None:
    keeper = CourseKeeper("r", "laptop", "Net", None)
    keeper.note(step(1, math.nan), 0.1)
    keeper.note(events.Eval(1, {"accuracy": 0.5, "loss": math.inf}), 0.2)
    answer = JobCourse.from_bytes(keeper.since(CourseAsked(), 1.0).to_bytes())
    assert answer.points[0].loss is None
    assert answer.evals[0].metrics == {"accuracy": 0.5}


async def test_the_energy_of_a_job_is_known_after_its_end(tmp_path: Path) -> None:
    async with MemoryHousehold(["a"]) as mesh:
        desk = JobDesk(mesh["a"], StateFolder(tmp_path))
        said = ["0.2 J a sample"]
        course = desk.begin("Net", 1, energy=lambda: said[0])
        course.note(step(1))
        assert course.whole().energy == "0.2 J a sample"
        said[0] = "0.3 J a sample"
        course.note(events.Done(1, 1.0, 1.0, None))
        said[0] = ""  # nothing trains any more
        course.end()
        later = JobDesk(mesh["a"], StateFolder(tmp_path))
        seen = await later.read()
        assert seen is not None
        assert seen.energy == "0.3 J a sample"


async def test_a_member_asks_the_holder_and_remembers_its_end(tmp_path: Path) -> None:
    async with MemoryHousehold(["a", "b"]) as mesh:
        desks = {n: JobDesk(mesh[n], None) for n in ("a", "b")}
        desks["a"] = JobDesk(mesh["a"], StateFolder(tmp_path))
        assert await desks["b"].read() is None
        course = desks["a"].begin("Net", 10, lambda: "a limits")
        course.note(PLAN)
        course.note(step(1))

        async def say(line: JobLine) -> None:
            said = Message(PROGRESS, line.fields())
            await mesh["a"].call(mesh["b"].self_id, said, timeout_seconds=10.0)

        await say(JobLine("Net", step=1))
        seen = await desks["b"].read()
        assert seen is not None
        assert (seen.holder, seen.state, seen.steps) == ("a", "training", 10)
        assert seen.limit == "a limits"
        assert seen.plan == course.whole().plan
        assert seen.earlier == ()
        course.note(step(2))
        course.end()
        await say(JobLine("Net", step=2, loss=0.5, over=True, outcome="stopped"))
        seen = await desks["b"].read()
        assert seen is not None
        assert (seen.state, seen.limit) == ("stopped", "")
        assert seen.last is not None
        assert seen.last.step == 2
        later = JobDesk(mesh["a"], StateFolder(tmp_path))
        assert await later.read() == course.whole()
        (earlier,) = later.begin("Net", 10).whole().earlier
        assert (earlier.run, earlier.state) == (course.run, "stopped")
        assert [point.step for point in earlier.points] == [1, 2]
        assert later.begin("Other", 10).whole().earlier == ()
        again = later.begin("Net", 10)
        again.end()
        after = JobDesk(mesh["a"], StateFolder(tmp_path))
        assert (await after.read()) == again.whole()
        assert again.whole().earlier == (earlier,)


def test_only_the_newest_runs_are_kept_and_a_few_of_their_points() -> None:
    keeper = CourseKeeper("r", "laptop", "Net", None)
    for number in range(1, 901):
        keeper.note(step(number), float(number))
    runs = EarlierRuns()
    for number in range(20):
        course = replace(keeper.since(CourseAsked(), 1.0), run=f"r{number}")
        runs = runs.with_run(f"model {number % 15}", course, number)
    for number in range(20, 29):
        runs = runs.with_run("Net", replace(course, run=f"r{number}"), number)
    assert [run.run for run in runs.of("Net")] == [f"r{n}" for n in range(24, 29)]
    assert len(runs.models) == EARLIER_MODELS
    points = runs.of("Net")[-1].points
    assert 100 <= len(points) <= EARLIER_POINTS
    assert read_form(EarlierRuns, write_form(runs), "runs") == runs


async def test_a_holder_that_is_gone_is_waited_for() -> None:
    async with MemoryHousehold(["a", "b"]) as mesh:
        desks = {n: JobDesk(mesh[n], None) for n in ("a", "b")}
        desks["a"].begin("Net", None).note(step(1))
        said = Message(PROGRESS, JobLine("Net", step=1).fields())
        await mesh["a"].call(mesh["b"].self_id, said, timeout_seconds=10.0)
        await desks["b"].read()
        await mesh.kill("a")
        seen = await desks["b"].read()
        assert seen is not None
        assert (seen.state, seen.message) == ("waiting", "a")


async def test_of_a_holder_that_gives_no_course_its_progress_is_shown() -> None:
    async with MemoryHousehold(["a", "b"]) as mesh:
        desk = JobDesk(mesh["b"], None)
        said = Message(PROGRESS, JobLine("Net", step=7, loss=0.5).fields())
        await mesh["a"].call(mesh["b"].self_id, said, timeout_seconds=10.0)
        seen = await desk.read()
        assert seen is not None
        assert (seen.holder, seen.model, seen.state) == ("a", "Net", "training")
        assert seen.last is not None
        assert (seen.last.step, seen.last.loss) == (7, 0.5)


async def test_any_member_steers_the_run_that_it_means() -> None:
    happened: list[tuple[str, str]] = []
    is_stopped = asyncio.Event()

    def note(action: str) -> Callable[[str], None]:
        return lambda by: happened.append((action, by))

    async def stop(by: str) -> None:
        happened.append(("stop", by))
        is_stopped.set()

    async with MemoryHousehold(["a", "b"]) as mesh:
        desks = {name: JobDesk(mesh[name], None) for name in ("a", "b")}
        with pytest.raises(UserError, match="another training"):
            await desks["b"].steer("r1", "pause")
        course = desks["a"].begin("Net", None)
        course.ways = {"pause": note("pause"), "resume": note("resume"), "stop": stop}
        said = Message(PROGRESS, JobLine("Net", step=1).fields())
        await mesh["a"].call(mesh["b"].self_id, said, timeout_seconds=10.0)
        await desks["b"].read()
        await desks["b"].steer(course.run, "pause")
        await desks["a"].steer(course.run, "resume")
        with pytest.raises(UserError, match="another training"):
            await desks["b"].steer("another", "stop")
        await desks["b"].steer(course.run, "stop")
        await is_stopped.wait()
        assert happened == [("pause", "b"), ("resume", "a"), ("stop", "b")]
        course.end()
        with pytest.raises(PeerError, match="has ended on a"):
            await desks["b"].steer(course.run, "pause")
        with pytest.raises(UserError, match="another training"):
            await desks["a"].steer(course.run, "pause")
        for desk in desks.values():
            await desk.close()
