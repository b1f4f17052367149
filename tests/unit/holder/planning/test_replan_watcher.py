"""What rounds take, as a holder holds it against the plan in force."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.coordinator.cluster_profile import ClusterProfiler
from p2ptrain.coordinator.measured_cluster import MeasuredDevice
from p2ptrain.events import Event
from p2ptrain.holder.driver import JobDriver
from p2ptrain.holder.planning import replan_watcher
from p2ptrain.holder.planning.plan_step import PlannedAttempt
from p2ptrain.holder.planning.planner_client import Planner
from p2ptrain.holder.planning.reconfiguration import ReconfigureReply
from p2ptrain.holder.reports import JobReports
from p2ptrain.holder.rounds.generation_runner import GenerationWork
from p2ptrain.holder.start.journal import Journal
from p2ptrain.messages.job_requests import JobQuestion
from p2ptrain.messages.kinds import LEAVING
from p2ptrain.net.message import Message
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.process.cpu_share import CpuSpan
from p2ptrain.recovery.choose_version import VersionChoice
from p2ptrain.recovery.drift_watch import CONFIRMED
from p2ptrain.recovery.generation_request import ReconfigureReason
from p2ptrain.recovery.profile_corrections import ExpectedSeconds
from p2ptrain.recovery.version import Version
from tests.support.memory_household import MemoryHousehold, MemoryMesh, memory_id
from tests.unit.coordinator.test_memory_model import request
from tests.unit.holder.start.test_journal import IN_FORCE, NEW
from tests.unit.messages.test_assignment import assignment, shared

ROUND_SECONDS = 1.0
DUE = ExpectedSeconds(0.5, 0.5)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(replan_watcher, "monotonic", lambda: self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds


async def _nothing(*_: object) -> bool:
    return True


@asynccontextmanager
async def _driver() -> AsyncIterator[tuple[JobDriver, MemoryMesh]]:
    """A job on a, the holder, and b."""
    async with MemoryHousehold(["a", "b"]) as mesh:
        events: list[Event] = []
        journal = Journal(None, NEW, pytest.fail)
        work = GenerationWork(pytest.fail, _nothing, pytest.fail, pytest.fail, pytest.fail)
        reports = JobReports(mesh["a"], NEW.reported, events.append, journal.committed)
        asked = request(8), ["u0", "u1", "u2"], work, journal, tuple, reports
        driver = JobDriver(mesh["a"], *asked, 1000, profiler=ClusterProfiler(mesh["a"]))
        yield driver, mesh["b"]
        await driver.replan_watcher.close()
        await driver.copies.close()


def _answer(b: str, *, new: bool, expects: bool = True) -> ReconfigureReply:
    """Of one stage on both."""
    here = memory_id("a")
    place = replace(shared(3, 1), devices=(here, b))
    names = {here: "a", b: "b"} if new else {}
    made = PlannedAttempt(
        IN_FORCE.plan,
        {d: MeasuredDevice(d, name, {}, MemoryBudgets(1)) for d, name in names.items()},
        expected={(0, here): DUE, (0, b): DUE} if expects else {},
    )
    choice = VersionChoice(Version(0, 0), ((b,),) * 3, 0, "")
    return ReconfigureReply(assignment(place), IN_FORCE.plan, choice, made)


def _round(driver: JobDriver, clock: Clock, b: str, slower: float) -> None:
    """In which b takes so many times as long as it should."""
    clock.passes(ROUND_SECONDS)
    taken = {(0, memory_id("a")): 1.0, (0, b): slower}
    spans = {seat: CpuSpan(DUE.wall * times, DUE.cpu) for seat, times in taken.items()}
    driver.replan_watcher.busy(spans, copying=False)


async def test_a_bug_in_a_look_keeps_no_device_from_leaving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        def __init__(self, *_: object) -> None:
            """As `ReplanEvaluation`."""

        async def answer(self) -> None:
            raise ZeroDivisionError

    monkeypatch.setattr(replan_watcher, "ReplanEvaluation", Broken)
    async with MemoryHousehold(["a", "b"]) as household:
        mesh, mesh_b, planning = household["a"], household["b"], request(8)
        b, found = mesh_b.self_id, asyncio.Event()
        wanted: list[tuple[ReconfigureReason, str | None]] = []

        def want(*change: Any) -> None:
            wanted.append(change)
            found.set()

        rules = SimpleNamespace(alive=frozenset({b}), faulty=frozenset(), lowered={})
        planner, profiler = Planner(mesh, pytest.fail), ClusterProfiler(mesh)
        asked = mesh, planning, planner, profiler, cast(Any, rules), lambda: 10, want
        watcher = replan_watcher.ReplanWatcher(*asked, replans=True)
        watcher.start()
        watcher.began(_answer(b, new=True))
        leaving = Message(LEAVING, JobQuestion(planning.job).fields())
        leave = asyncio.create_task(mesh_b.call(mesh.self_id, leaving, timeout_seconds=20.0))
        async with asyncio.timeout(10.0):
            await found.wait()
        assert wanted == [(ReconfigureReason.LEAVE, b)]
        await watcher.close()
        await leave


async def test_what_an_evaluation_takes_is_no_part_of_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each that computes seems to wait for others most of the time, and is never too slow."""
    clock = Clock(monkeypatch)
    async with _driver() as (driver, mesh_b):
        b = mesh_b.self_id
        driver.replan_watcher.began(_answer(b, new=True))
        for _ in range(1 + CONFIRMED):
            clock.passes(10.0)
            driver.replan_watcher.pause_over()
            _round(driver, clock, b, 1.8)
        assert driver.replan_watcher.corrections.devices == {memory_id("a"): 1.0, b: 1.8}


@pytest.mark.parametrize("new", [True, False])
async def test_rounds_are_held_against_what_is_expected_of_the_plan_in_force(
    monkeypatch: pytest.MonkeyPatch, *, new: bool
) -> None:
    """Of a plan that stays as before; nothing where a new one on the same devices says nothing."""
    clock = Clock(monkeypatch)
    async with _driver() as (driver, mesh_b):
        b, rounds = mesh_b.self_id, driver.replan_watcher
        rounds.began(_answer(b, new=True))
        rounds.began(_answer(b, new=new, expects=False))
        for _ in range(1 + CONFIRMED):
            _round(driver, clock, b, 1.8)
        assert (rounds.corrections.of_device(b) > 1.0) is not new


async def test_a_holder_that_was_started_again_expects_what_it_hears_of_the_plan_that_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    async with _driver() as (driver, mesh_b):
        b, rounds = mesh_b.self_id, driver.replan_watcher
        assert not rounds.knows_plan
        rounds.began(_answer(b, new=False))
        assert rounds.knows_plan
        for _ in range(1 + CONFIRMED):
            _round(driver, clock, b, 1.8)
        assert rounds.corrections.of_device(b) == 1.8


async def test_rounds_of_a_plan_that_says_nothing_are_held_against_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of some tiles: not against what was expected of others before it."""
    clock = Clock(monkeypatch)
    async with _driver() as (driver, mesh_b):
        here, b, rounds = memory_id("a"), mesh_b.self_id, driver.replan_watcher
        rounds.began(_answer(b, new=True))
        alone = assignment(replace(shared(3, 1), devices=(here,)))
        rounds.began(replace(_answer(b, new=True, expects=False), assignment=alone))
        for _ in range(1 + CONFIRMED):
            clock.passes(ROUND_SECONDS)
            driver.replan_watcher.busy({(0, here): CpuSpan(DUE.wall * 1.8, DUE.cpu)}, copying=False)
        assert not rounds.corrections.devices
