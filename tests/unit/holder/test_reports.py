"""What people hear of a job that is disturbed."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from p2ptrain.events import Event, Failure, Recovered, Step, Warning
from p2ptrain.holder.planning.plan_step import PlannedAttempt
from p2ptrain.holder.planning.reconfiguration import ReconfigureReply
from p2ptrain.holder.reports import JobReports
from p2ptrain.recovery.choose_version import VersionChoice
from p2ptrain.recovery.cores.job_history import ReportedProgress
from p2ptrain.recovery.version import Version
from tests.support.memory_household import MemoryHousehold, memory_id
from tests.unit.holder.start.test_journal import IN_FORCE

ANSWER = ReconfigureReply(
    IN_FORCE.assignment,
    IN_FORCE.plan,
    VersionChoice(Version(0, 0), (("a",),) * 3, 0, ""),
    PlannedAttempt(IN_FORCE.plan),
)


@pytest.mark.parametrize(
    ("epochs", "told"),
    [
        ([False], [Step]),  # somebody left
        ([True], [Recovered, Step]),
        ([True, False], [Recovered, Step]),  # and before the first new step, somebody left
        ([False, True], [Recovered, Step]),
    ],
)
async def test_who_hears_of_a_failure_hears_of_its_end(
    epochs: list[bool], told: list[type[Event]]
) -> None:
    async with MemoryHousehold(["a"]) as mesh:
        events: list[Event] = []
        reports = JobReports(mesh["a"], ReportedProgress(0, 0), events.append, lambda _: None)
        reports.begin(ANSWER, after_trouble=False)
        reports.step(1, 0.5, 8)
        for after_trouble in epochs:
            reports.trouble()
            reports.begin(ANSWER, after_trouble=after_trouble)
        reports.step(1, 0.5, 8)
        reports.step(2, 0.5, 8)
        reports.trouble()
        reports.begin(ANSWER, after_trouble=False)
        reports.step(3, 0.5, 8)
        assert [type(event) for event in events] == [Step, *told, Step]


@pytest.mark.parametrize("kind", [JobReports.counts_nothing, JobReports.left_out])
async def test_steps_of_one_trouble_are_named_with_the_first_second_fourth_and_so_on(
    kind: Callable[[JobReports, int], None],
) -> None:
    async with MemoryHousehold(["a"]) as mesh:
        events: list[Event] = []
        reports = JobReports(mesh["a"], ReportedProgress(0, 0), events.append, lambda _: None)
        for step in (*range(1, 8), *range(5, 13)):  # three are made again after a failure
            kind(reports, step)
        messages = [event.message for event in events if isinstance(event, Warning)]
        assert [re.findall(r"step (\d+)", message) for message in messages] == [
            [step] for step in ("1", "2", "4", "8")
        ]
        assert "so far" not in messages[0]
        assert messages[3].endswith(". There are 8 such steps so far")


async def test_a_device_that_was_removed_from_the_household_has_its_name() -> None:
    async with MemoryHousehold(["a", "b"]) as mesh:
        events: list[Event] = []
        reports = JobReports(mesh["a"], ReportedProgress(0, 0), events.append, lambda _: None)
        reports.begin(ANSWER, after_trouble=False)
        del mesh["a"].seen[memory_id("b")]
        reports.failure(memory_id("b"), is_short=False)
        assert events == [Failure("b")]


async def test_what_an_earlier_process_has_reported_is_written_down_again_and_not_counted() -> None:
    """A power cut has lost the last second of it; the others have those updates."""
    async with MemoryHousehold(["a"]) as mesh:
        events: list[Event] = []
        written: list[ReportedProgress] = []
        reports = JobReports(mesh["a"], ReportedProgress(4, 3), events.append, written.append)
        reports.goes_on_from(7)
        assert (reports.reported, reports.steps_made) == (ReportedProgress(7, 3), 0)
        reports.begin(ANSWER, after_trouble=True)
        reports.step(8, 0.5, 8)
        reports.goes_on_from(6)
        assert written == [ReportedProgress(7, 3), ReportedProgress(8, 3)]
        assert reports.steps_made == 1
        assert [event.step for event in events if isinstance(event, Step)] == [8]


async def test_steps_within_a_tick_of_a_coarse_clock_have_a_speed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2ptrain.holder.reports.monotonic", lambda: 5.0)
    monkeypatch.setattr("p2ptrain.holder.reports.TICK_SECONDS", 1 / 64)
    async with MemoryHousehold(["a"]) as mesh:
        events: list[Event] = []
        reports = JobReports(mesh["a"], ReportedProgress(0, 0), events.append, lambda _: None)
        reports.begin(ANSWER, after_trouble=False)
        reports.step(1, 0.5, 8)
        assert events == [Step(1, 0.5, 8 * 64, 0.0)]
