"""Whether a holder waits for its coordinator, plans itself, or passes it over."""

from __future__ import annotations

import pytest

from p2ptrain.recovery.cores import planner_core
from p2ptrain.recovery.cores.planner_core import AskedPlan, PlannerCore
from p2ptrain.recovery.recovery_settings import Patience


def _run(
    asked: AskedPlan, seconds: float, *, works: bool
) -> dict[float, planner_core.PlannerInstruction]:
    """What it says until then, by time; the coordinator says that it works, or nothing."""
    said: dict[float, planner_core.PlannerInstruction] = {}
    while asked.next_wakeup <= seconds:
        now = asked.next_wakeup
        for one in asked.tick(now):
            if not isinstance(one, planner_core.AskForSign):
                said[now] = one
            elif works:
                assert asked.handle(planner_core.Sign(True), now) == []
    return said


def test_an_answer_is_taken_and_nobody_else_plans() -> None:
    asked = PlannerCore("h").asked(0.0, "c")
    assert asked.start() == [planner_core.AskPlanner("c")]
    assert _run(asked, 4.0, works=True) == {}
    assert asked.handle(planner_core.PlanAnswered(), 4.5) == []
    assert asked.is_over
    assert asked.next_wakeup == float("inf")


def test_a_holder_without_a_coordinator_plans_itself() -> None:
    assert PlannerCore("h").asked(0.0, None).start() == [planner_core.PlanHere()]


def test_silence_is_passed_over_in_five_seconds_and_planned_here() -> None:
    asked = PlannerCore("h").asked(0.0, "c")
    asked.start()
    while asked.next_wakeup < 5.0:
        asked.tick(asked.next_wakeup)
        asked.handle(planner_core.Sign(False), asked.next_wakeup)
    assert asked.tick(5.0) == [
        planner_core.PassOver("c", "did not answer for 5 s"),
        planner_core.PlanHere(),
    ]
    assert asked.handle(planner_core.PlanAnswered(), 6.0) == []
    assert not asked.is_over, "what comes too late is not taken"
    asked.handle(planner_core.FoundHere(), 7.0)
    assert asked.is_over


def test_a_wrong_answer_is_passed_over_at_once() -> None:
    asked = PlannerCore("h").asked(0.0, "c")
    asked.start()
    assert asked.handle(planner_core.Useless("lies"), 0.1) == [
        planner_core.PassOver("c", "lies"),
        planner_core.PlanHere(),
    ]


def test_a_link_that_ended_says_nothing_against_it() -> None:
    asked = PlannerCore("h").asked(0.0, "c")
    asked.start()
    assert asked.handle(planner_core.NoAnswer(), 0.1) == [planner_core.PlanHere()]


def test_one_that_works_and_is_always_late_keeps_nobody_waiting_and_is_passed_over() -> None:
    core = PlannerCore("h")
    for number in range(1, core.patience.most_late + 1):
        asked = core.asked(0.0, "c")
        asked.start()
        assert _run(asked, 9.0, works=True) == {5.0: planner_core.PlanHere()}
        late = asked.handle(planner_core.FoundHere(), 9.5)
        assert asked.was_late
        assert bool(late) == (number == core.patience.most_late)


@pytest.mark.parametrize(
    "says", [planner_core.PlanAnswered(), planner_core.Useless("lies"), planner_core.NoAnswer()]
)
def test_only_late_answers_in_a_row_count(says: planner_core.PlannerEvent) -> None:
    core = PlannerCore("h", Patience(most_late=2))
    for event in (planner_core.FoundHere(), says, planner_core.FoundHere()):
        asked = core.asked(0.0, "c")
        asked.start()
        assert not [x for x in asked.handle(event, 9.0) if getattr(x, "why", "lies") != "lies"]


def test_a_look_that_nobody_waits_for_is_not_done_twice() -> None:
    asked = PlannerCore("h").asked(0.0, "c", waits=True)
    asked.start()
    assert _run(asked, 100.0, works=True) == {}
    assert asked.give_up() == []


def test_a_holder_waits_for_itself() -> None:
    asked = PlannerCore("h").asked(0.0, "h")
    assert asked.start() == [planner_core.AskPlanner("h")]
    assert asked.next_wakeup == float("inf")
    assert asked.handle(planner_core.Useless("a bug"), 1.0) == [planner_core.PlanHere()]
