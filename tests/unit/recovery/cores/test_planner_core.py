"""Whether a holder waits for its coordinator, plans itself, or passes it over."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2ptrain.recovery.cores.planner_core import AskedPlan, PlannerCore
from p2ptrain.recovery.recovery_settings import Patience
from tests.unit.recovery.cores.recorded_port import Asked, RecordedPort


def _asked(
    coordinator: str | None = "c", core: PlannerCore | None = None, *, waits: bool = False
) -> tuple[AskedPlan, RecordedPort]:
    """At 0 s, and begun."""
    port = RecordedPort()
    asked = (core or PlannerCore("h")).asked(0.0, coordinator, port, waits=waits)
    asked.start()
    begun = [("plan_here",)] if coordinator is None else [("ask", coordinator)]
    assert port.taken() == begun
    return asked, port


def _run(
    asked: AskedPlan, port: RecordedPort, seconds: float, *, works: bool
) -> list[tuple[float, Asked]]:
    """What it has done until then; the coordinator says that it works, or nothing."""
    done: list[tuple[float, Asked]] = []
    while asked.next_wakeup <= seconds:
        now = asked.next_wakeup
        asked.tick(now)
        for one in port.taken():
            if one != ("ask_for_sign", "c"):
                done.append((now, one))
            elif works:
                asked.sign(now, works=True)
    return done


def test_an_answer_is_taken_and_nobody_else_plans() -> None:
    asked, port = _asked()
    assert _run(asked, port, 4.0, works=True) == []
    asked.answered()
    assert port.taken() == []
    assert asked.is_over
    assert asked.next_wakeup == float("inf")


def test_a_holder_without_a_coordinator_plans_itself() -> None:
    _asked(None)


def test_silence_is_passed_over_in_five_seconds_and_planned_here() -> None:
    asked, port = _asked()
    while asked.next_wakeup < 5.0:
        asked.tick(asked.next_wakeup)
        asked.sign(asked.next_wakeup, works=False)
    port.taken()
    asked.tick(5.0)
    assert port.taken() == [("pass_over", "c", "did not answer for 5 s"), ("plan_here",)]
    asked.answered()
    assert port.taken() == []
    assert not asked.is_over, "what comes too late is not taken"
    asked.found_here()
    assert asked.is_over


def test_a_wrong_answer_is_passed_over_at_once() -> None:
    asked, port = _asked()
    asked.useless("lies")
    assert port.taken() == [("pass_over", "c", "lies"), ("plan_here",)]


def test_a_link_that_ended_says_nothing_against_it() -> None:
    asked, port = _asked()
    asked.no_answer()
    assert port.taken() == [("plan_here",)]


def test_one_that_works_and_is_always_late_keeps_nobody_waiting_and_is_passed_over() -> None:
    core = PlannerCore("h")
    for number in range(1, core.patience.most_late + 1):
        asked, port = _asked(core=core)
        assert _run(asked, port, 9.0, works=True) == [(5.0, ("plan_here",))]
        asked.found_here()
        assert asked.was_late
        assert bool(port.taken()) == (number == core.patience.most_late)


@pytest.mark.parametrize(
    "says", [AskedPlan.answered, lambda asked: asked.useless("lies"), AskedPlan.no_answer]
)
def test_only_late_answers_in_a_row_count(says: Callable[[AskedPlan], None]) -> None:
    core = PlannerCore("h", Patience(most_late=2))
    for what_happens in (AskedPlan.found_here, says, AskedPlan.found_here):
        asked, port = _asked(core=core)
        what_happens(asked)
        assert [one for one in port.taken() if one[0] == "pass_over" and one[-1] != "lies"] == []


def test_a_look_that_nobody_waits_for_is_not_done_twice() -> None:
    asked, port = _asked(waits=True)
    assert _run(asked, port, 100.0, works=True) == []
    asked.found_here()
    assert port.taken() == []


def test_a_holder_waits_for_itself() -> None:
    asked, port = _asked("h")
    assert asked.next_wakeup == float("inf")
    asked.useless("a bug")
    assert port.taken() == [("plan_here",)]
