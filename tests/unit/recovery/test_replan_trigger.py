"""When a job that runs well looks for another plan, and when it changes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.recovery.generation_request import ReconfigureReason
from p2ptrain.recovery.recovery_settings import HOME
from p2ptrain.recovery.replan_trigger import (
    LONGEST_SETTLE_SECONDS,
    MAX_MOVES,
    MAX_TRIES,
    OVERTAKE_SECONDS,
    AdoptPlan,
    ElasticInstruction,
    EvaluateNow,
    RefuseLeave,
    ReplanTrigger,
)

AB = frozenset({"a", "b"})
_NEVER = float("inf")


def begun(*, replans: bool = True) -> ReplanTrigger:
    """Training on a, the holder, and b."""
    core = ReplanTrigger("a", replans=replans)
    core.joined("b", 0.0)
    core.ended(0.0)
    assert core.began(AB, 0.0) == []
    return core


SEEN = frozenset("abcdefgh")
"""All devices, where a test says nothing else."""


def look(instructions: list[ElasticInstruction]) -> EvaluateNow:
    (one,) = instructions
    assert isinstance(one, EvaluateNow)
    return one


def with_c_that_does_not_pay() -> ReplanTrigger:
    """It came at 1 s, and was looked at."""
    core = begun()
    core.joined("c", 1.0)
    assert core.answered(look(core.tick(3.0)).number, frozenset(), SEEN, 4.0) == []
    return core


def test_newcomers_settle_before_they_are_looked_at_and_all_at_once() -> None:
    core = begun()
    assert core.joined("c", 1.0) == []
    assert core.joined("d", 1.9) == []
    assert core.tick(1.0 + HOME.newcomer_settle_seconds) == []
    assert core.next_wakeup == 1.9 + HOME.newcomer_settle_seconds
    found = look(core.tick(core.next_wakeup))
    assert found.reason is ReconfigureReason.JOIN
    changed = core.answered(found.number, AB | {"c"}, SEEN, 5.0)
    assert changed == [AdoptPlan(ReconfigureReason.JOIN)]


def test_who_does_not_pay_stays_outside_until_the_next_drift_look() -> None:
    core = with_c_that_does_not_pay()
    assert core.tick(1000.0) == []
    later = look(core.compared(1001.0))
    assert later.reason is ReconfigureReason.DRIFT
    changed = core.answered(later.number, AB | {"c"}, SEEN, 1002.0)
    assert changed == [AdoptPlan(ReconfigureReason.JOIN)]


def test_a_device_that_was_suspected_has_not_come_again() -> None:
    core = with_c_that_does_not_pay()
    assert core.joined("c", 5.0) == []
    assert core.tick(100.0) == []


def test_a_device_that_comes_back_is_looked_at_again() -> None:
    core = with_c_that_does_not_pay()
    core.gone("c", 5.0)
    core.joined("c", 6.0)
    assert look(core.tick(7.0)).reason is ReconfigureReason.JOIN


def test_who_came_while_a_plan_was_made_is_looked_at_once_it_is_in_force() -> None:
    core = begun()
    core.ended(1.0)
    assert core.joined("c", 1.1) == []
    assert core.tick(9.0) == []  # nothing is in force
    assert look(core.began(AB, 10.0)).reason is ReconfigureReason.JOIN


def test_a_device_alone_never_looks() -> None:
    core = ReplanTrigger("a")
    core.began(frozenset("a"), 0.0)
    assert core.compared(9.0) == []


def test_nothing_is_due_where_nobody_is_new() -> None:
    core = begun()
    assert core.next_wakeup == float("inf")
    core.joined("c", 1.0)
    assert core.next_wakeup == 1.0 + HOME.newcomer_settle_seconds
    core.gone("c", 1.1)
    assert core.next_wakeup == float("inf")


def fails(core: ReplanTrigger, number: int, now: float) -> list[ElasticInstruction]:
    return core.failed(number, now)


def sees_the_others_only(core: ReplanTrigger, number: int, now: float) -> list[ElasticInstruction]:
    """There was no link to c yet, or it could not be measured."""
    return core.answered(number, frozenset(), AB, now)


@pytest.mark.parametrize("ends", [fails, sees_the_others_only])
def test_looks_that_settle_nothing_are_made_again_less_and_less_often(
    ends: Callable[[ReplanTrigger, int, float], list[ElasticInstruction]],
) -> None:
    core, now, at = begun(), 10.0, [10.0]
    core.joined("c", 0.0)
    instructions = core.tick(now)
    while ends(core, look(instructions).number, now) == [] and core.next_wakeup < _NEVER:
        assert core.tick(core.next_wakeup - 0.1) == []
        now = core.next_wakeup
        at.append(now)
        instructions = core.tick(now)
    waits = [later - earlier for earlier, later in pairwise(at)]
    assert waits == [HOME.evaluation_retry_seconds * 2**n for n in range(MAX_TRIES - 1)]
    core.ended(1000.0)
    assert look(core.began(AB, 1001.0)).reason is ReconfigureReason.JOIN  # a new plan, a new chance


def test_who_was_not_in_sight_is_taken_in_by_a_later_look() -> None:
    core = begun()
    core.joined("c", 1.0)
    core.answered(look(core.tick(3.0)).number, frozenset(), frozenset("ab"), 4.0)
    again = look(core.tick(4.0 + HOME.evaluation_retry_seconds))
    changed = core.answered(again.number, AB | {"c"}, SEEN, 8.0)
    assert changed == [AdoptPlan(ReconfigureReason.JOIN)]


def test_who_comes_while_another_cannot_be_seen_is_looked_at_as_soon_as_ever() -> None:
    core = begun()
    core.joined("c", 1.0)
    found = look(core.tick(3.0))
    core.joined("d", 3.5)
    core.answered(found.number, frozenset(), frozenset("ab"), 4.0)
    assert core.next_wakeup == 3.5 + HOME.newcomer_settle_seconds
    found = look(core.tick(core.next_wakeup))
    core.answered(found.number, frozenset(), frozenset("abd"), 5.0)
    core.joined("e", 6.0)
    assert core.next_wakeup == 6.0 + HOME.newcomer_settle_seconds


def test_what_was_found_is_not_replaced_by_another_look_before_it_is_in_force() -> None:
    """Else the change would be made for a reason that what it proposes was not found for."""
    core = begun()
    core.joined("c", 1.0)
    drift = look(core.compared(1.5))
    assert core.answered(drift.number, AB, frozenset("ab"), 1.9) == [
        AdoptPlan(ReconfigureReason.DRIFT)
    ]
    assert core.next_wakeup == _NEVER
    assert core.tick(30.0) == core.compared(31.0) == []
    assert look(core.leaving("b", 32.0)).reason is ReconfigureReason.LEAVE  # it waits for an answer
    core.ended(33.0)
    gone, *joins = core.began(frozenset("a"), 34.0, AB)
    assert gone == AdoptPlan(ReconfigureReason.LEAVE, "b")
    assert look(joins).reason is ReconfigureReason.JOIN


def test_who_came_while_a_plan_was_made_that_it_had_no_part_in_is_looked_at_then() -> None:
    """A link that broke is answered by the same plan, and nobody is measured for that."""
    core = begun()
    core.ended(1.0)
    core.joined("c", 1.1)
    assert look(core.began(AB, 10.0, frozenset())).reason is ReconfigureReason.JOIN
    core = begun()
    core.ended(1.0)
    core.joined("c", 1.1)
    assert core.began(AB, 10.0, AB | {"c"}) == []


def test_a_leaver_is_looked_at_at_once_whatever_else_is() -> None:
    core = begun()
    drift = look(core.compared(1.0))
    leave = look(core.leaving("b", 2.0))
    assert (leave.reason, leave.without) == (ReconfigureReason.LEAVE, {"b"})
    assert core.answered(drift.number, AB, SEEN, 3.0) == []  # it was given up
    assert core.answered(leave.number, frozenset({"a"}), SEEN, 4.0) == [
        AdoptPlan(ReconfigureReason.LEAVE, "b")
    ]


def test_a_leaver_that_the_others_cannot_do_without_hears_so_and_nothing_changes() -> None:
    core = begun()
    found = look(core.leaving("b", 1.0))
    assert core.failed(found.number, 2.0, "too little memory") == [
        RefuseLeave("b", "too little memory")
    ]
    assert core.tick(900.0) == []
    assert look(core.leaving("b", 901.0)).reason is ReconfigureReason.LEAVE  # it may ask again


def test_a_drift_look_that_a_leave_overtook_is_made_again_where_all_stays() -> None:
    core = begun()
    look(core.compared(1.0))
    leave = look(core.leaving("b", 1.5))
    stay, drift = core.failed(leave.number, 2.0, "too little memory")
    assert isinstance(stay, RefuseLeave)
    assert look([drift]).reason is ReconfigureReason.DRIFT


@pytest.mark.parametrize("stays", [True, False])
def test_what_drifts_during_a_look_is_looked_at_after_it_unless_the_plan_ends(stays: bool) -> None:
    core = begun()
    first = look(core.compared(1.0))
    assert core.compared(1.5) == []
    found = core.answered(first.number, frozenset() if stays else AB, SEEN, 2.0)
    if stays:
        again = look(found)
        assert again.reason is ReconfigureReason.DRIFT
        assert core.answered(again.number, frozenset(), SEEN, 3.0) == []
    else:
        assert found == [AdoptPlan(ReconfigureReason.DRIFT)]
        core.ended(2.0)
        assert core.began(AB, 3.0) == []


def test_who_comes_overtakes_a_drift_look_which_is_made_again() -> None:
    core = begun()
    drift = look(core.compared(1.0))
    core.joined("c", 2.0)
    join = look(core.tick(core.next_wakeup))
    assert (join.reason, core.answered(drift.number, frozenset(), SEEN, 3.5)) == (
        ReconfigureReason.JOIN,
        [],
    )
    assert (
        look(core.answered(join.number, frozenset(), SEEN, 4.0)).reason is ReconfigureReason.DRIFT
    )


def test_who_comes_while_others_are_looked_at_is_not_forgotten_and_waits_a_moment_only() -> None:
    core = begun()
    core.joined("c", 1.0)
    look(core.tick(2.0))
    core.joined("d", 5.0)
    assert core.next_wakeup == 5.0 + OVERTAKE_SECONDS
    found = look(core.tick(core.next_wakeup))  # of both, as the first has not been answered
    core.joined("e", 26.0)
    [again] = core.answered(found.number, frozenset(), frozenset("abcd"), 40.0)
    assert look([again]).reason is ReconfigureReason.JOIN
    assert core.answered(look([again]).number, frozenset(), SEEN, 41.0) == []
    assert core.next_wakeup == float("inf")


def test_devices_that_come_one_after_the_other_do_not_put_off_the_first_for_ever() -> None:
    core = begun()
    for number in range(10):
        core.joined(f"c{number}", 1.0 + 0.9 * number)
        if core.next_wakeup <= 1.0 + 0.9 * (number + 1):
            break
    assert core.next_wakeup == 1.0 + LONGEST_SETTLE_SECONDS


def test_who_came_is_not_held_against_who_comes_next_nor_are_changes_of_speed() -> None:
    core = begun()
    found = look(core.compared(1.0))
    core.answered(found.number, AB, SEEN, 2.0)
    for second, device in ((10.0, "c"), (40.0, "d")):
        devices = AB if device == "c" else AB | {"c"}
        core.ended(second - 5.0)
        core.began(devices, second - 4.0)
        core.joined(device, second)
        found = look(core.tick(second + HOME.newcomer_settle_seconds))
        assert found.moved_seconds_ago == ()
        out = core.answered(found.number, devices | {device}, SEEN, second + 2.0)
        assert out == [AdoptPlan(ReconfigureReason.JOIN)]


def test_who_came_while_a_leaver_was_replaced_is_looked_at_then() -> None:
    """A plan for a leave measures nobody: who is new has no part in it, however good it is."""
    core = begun()
    core.joined("c", 1.0)
    found = look(core.leaving("b", 1.1))
    core.answered(found.number, frozenset("a"), SEEN, 1.2)
    core.ended(1.3)
    assert look(core.began(frozenset("a"), 3.0)).reason is ReconfigureReason.JOIN


def test_a_leaver_goes_though_nothing_was_found() -> None:
    core = begun()
    found = look(core.leaving("b", 1.0))
    assert core.failed(found.number, 4.0) == [AdoptPlan(ReconfigureReason.LEAVE, "b")]


def test_who_has_no_part_leaves_without_a_look() -> None:
    core = begun()
    core.joined("c", 1.0)
    assert core.leaving("c", 1.1) == [AdoptPlan(ReconfigureReason.LEAVE, "c")]
    assert core.tick(9.0) == []


def test_a_leaver_is_not_forgotten_when_a_failure_comes_between() -> None:
    core = begun()
    core.leaving("b", 1.0)
    core.ended(2.0)
    assert look(core.began(AB, 3.0)).reason is ReconfigureReason.LEAVE
    core.ended(4.0)
    assert core.began(frozenset({"a"}), 5.0) == [AdoptPlan(ReconfigureReason.LEAVE, "b")]


def test_a_plan_that_is_to_stay_changes_only_for_who_comes_or_goes() -> None:
    core = begun(replans=False)
    assert core.compared(1.0) == []
    core.joined("c", 2.0)
    found = look(core.tick(4.0))
    assert core.answered(found.number, AB, SEEN, 5.0) == []  # the same devices, work divided again
    core.joined("d", 6.0)
    found = look(core.tick(8.0))
    assert core.answered(found.number, AB | {"d"}, SEEN, 9.0) == [AdoptPlan(ReconfigureReason.JOIN)]


def test_changes_that_nothing_forced_are_remembered() -> None:
    core = begun()
    found = look(core.compared(1.0))
    core.answered(found.number, AB, SEEN, 2.0)
    core.ended(2.0)
    core.began(AB, 3.0)
    assert look(core.compared(12.0)).moved_seconds_ago == (10.0,)


def test_of_many_changes_the_last_ones_are_remembered() -> None:
    """Each doubles what the next has to gain, so that more make no difference."""
    core = begun()
    for change in range(MAX_MOVES + 5):
        found = look(core.compared(10.0 * change))
        core.answered(found.number, AB, SEEN, 10.0 * change)
        core.began(AB, 10.0 * change)
    ages = look(core.compared(1000.0)).moved_seconds_ago
    assert (len(ages), ages[-1]) == (MAX_MOVES, 1000.0 - 10.0 * (MAX_MOVES + 4))


def test_what_was_planned_in_haste_is_looked_at_once_whatever_was_changed_lately() -> None:
    core = begun()
    found = look(core.compared(1.0))
    core.answered(found.number, AB, SEEN, 2.0)
    core.ended(2.0)
    core.began(AB, 3.0, in_haste=True)
    assert core.in_haste
    found = look(core.compared(12.0))
    assert found.moved_seconds_ago == ()
    assert core.answered(found.number, AB, SEEN, 13.0) == [AdoptPlan(ReconfigureReason.DRIFT)]
    core.ended(13.0)
    core.began(AB, 14.0)
    assert not core.in_haste
    later = look(core.compared(22.0))
    assert later.moved_seconds_ago == (20.0,)  # the one in between does not count


def test_a_look_that_fails_leaves_what_was_planned_in_haste_to_the_next() -> None:
    core = begun()
    core.began(AB, 3.0, in_haste=True)
    found = look(core.compared(12.0))
    core.failed(found.number, 13.0)
    assert core.in_haste
    found = look(core.compared(32.0))
    core.answered(found.number, frozenset(), SEEN, 33.0)
    assert not core.in_haste


_devices = st.sampled_from(["b", "c", "d"])
_sets = st.frozensets(_devices).map(lambda some: some | {"a"})
_events: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(st.sampled_from(["joined", "gone", "leaving"]), _devices),
    st.tuples(st.sampled_from(["compared", "ended"])),
    st.tuples(st.just("began"), _sets, _sets),
    st.tuples(st.just("answered"), st.integers(0, 12), st.frozensets(_devices), _sets),
    st.tuples(st.just("failed"), st.integers(0, 12), st.none() | st.just("no plan")),
)
"""A method of the rules, and what it takes beside the time."""


def _happens(core: ReplanTrigger, event: tuple[Any, ...], now: float) -> list[ElasticInstruction]:
    match event:
        case ("began", devices, considered):
            return core.began(devices, now, considered)
        case ("failed", number, why):
            return core.failed(number, now, why)
        case (name, *arguments):
            out: list[ElasticInstruction] = getattr(core, name)(*arguments, now)
            return out
    raise AssertionError


@given(st.lists(st.tuples(_events, st.floats(0.0, 3.0)), max_size=40), st.booleans())
def test_whatever_happens_looks_are_one_at_a_time_and_leavers_are_answered(
    course: list[tuple[tuple[Any, ...], float]], replans: bool
) -> None:
    core, now = ReplanTrigger("a", replans=replans), 0.0
    open_look: EvaluateNow | None = None
    leaving: set[str] = set()
    for event, wait in course:
        now += wait
        match event:
            case ("ended" | "began", *_):
                open_look = None
            case ("leaving", device):
                leaving.add(device)
                open_look = None
            case ("gone", device):
                leaving.discard(device)
            case ("answered" | "failed", number, *_):
                if open_look is not None and number == open_look.number:
                    open_look = None
        for instruction in _happens(core, event, now) + core.tick(now):
            if isinstance(instruction, EvaluateNow):
                # a leave's look nobody overtakes; who comes may overtake the others
                assert open_look is None or open_look.reason is not ReconfigureReason.LEAVE
                assert open_look is None or instruction.reason is not ReconfigureReason.DRIFT
                open_look = instruction
            elif isinstance(instruction, RefuseLeave):
                leaving.discard(instruction.device)
            elif instruction.leaver is not None:
                leaving.discard(instruction.leaver)
        assert core.next_wakeup > now
    # In force, with everything answered, nobody waits for ever.
    for _ in range(4):
        now += 100.0
        answers = [core.began(frozenset("abcd"), now)]
        while answers:
            for instruction in answers.pop():
                if isinstance(instruction, EvaluateNow):
                    answers.append(core.failed(instruction.number, now))
                elif isinstance(instruction, AdoptPlan) and instruction.leaver is not None:
                    leaving.discard(instruction.leaver)
    assert not leaving
