"""What a holder does about trouble."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.recovery.choose_version import StateLost
from p2ptrain.recovery.cores.holder_core import START_SECONDS, HolderCore
from p2ptrain.recovery.cores.holder_port import HolderPhase, HolderPort, PortCall
from p2ptrain.recovery.cores.job_history import NotedHistory
from p2ptrain.recovery.cores.liveness import MAX_FRUITLESS
from p2ptrain.recovery.cores.retry_policy import EARLY_STEPS, MAX_SPOILED, RETRY_SECONDS
from p2ptrain.recovery.generation_request import (
    GENERATIONS_PER_REQUEST,
    GenerationRequest,
    ReconfigureFailure,
    ReconfigureReason,
)
from p2ptrain.recovery.placement import PlacedStage, Placement
from p2ptrain.recovery.recovery_settings import HOME
from p2ptrain.recovery.version import Lineage, Version

_FIRST = Version(0, 0)


def _placed(generation: int, *devices: str) -> Placement:
    stages = (PlacedStage(0, 2, ("h",)), PlacedStage(2, 4, devices))
    return Placement(generation, "h", _FIRST, Lineage(), stages)


class _Named:
    """`on.round_stalled(...)`: an event; `do.stop_rounds(...)`: a call of the port."""

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        return lambda *args, **more: (name, *args, more) if more else (name, *args)


on = do = port = _Named()


def _core(reported: int = 0, journal: NotedHistory | None = None) -> HolderCore:
    return HolderCore("h", cast("HolderPort", port), 4, reported, journal=journal)


def _done(calls: list[PortCall]) -> list[Any]:
    return [call() for call in calls]


def _feed(core: HolderCore, *events: tuple[Any, ...], now: float = 1.0) -> list[Any]:
    out = []
    for name, *args in events:
        more = args.pop() if args and isinstance(args[-1], dict) else {}
        out += _done(getattr(core, name)(now, *args, **more))
    return out


def _start(core: HolderCore, now: float) -> list[Any]:
    return _done(core.start(now))


def _tick(core: HolderCore, now: float) -> list[Any]:
    return _done(core.tick(now))


def _refused(*args: Any, **more: Any) -> tuple[Any, ...]:
    refused: tuple[Any, ...] = on.refused(ReconfigureFailure(*args, **more))
    return refused


def _one(out: list[Any], name: str) -> Any:
    """What the port's method of that name was called with, once."""
    [found] = [call[1] for call in out if call[0] == name]
    return found


def _ask_of(out: list[Any]) -> GenerationRequest:
    ask: GenerationRequest = _one(out, "prepare")
    return ask


def _training(*devices: str) -> HolderCore:
    core = _core()
    _feed(core, *(on.member_appeared(device) for device in "ab"))
    _start(core, 0.0)
    _feed(core, on.generation_ready(core.number, _placed(1, *devices)))
    assert core.phase is HolderPhase.TRAINING
    return core


def test_the_journal_comes_before_the_beginning() -> None:
    core = _core()
    _feed(core, on.member_appeared("a"))
    reserved, ask = _start(core, 0.0)
    assert (reserved[0], ask[0]) == ("write_down", "prepare")
    assert reserved[1].next_generation == 1 + GENERATIONS_PER_REQUEST
    (written, journal), (begin, _, reason, _) = _feed(
        core, on.generation_ready(core.number, _placed(7, "a"))
    )
    assert (written, begin) == ("write_down", "begin")
    assert (journal.next_generation, journal.placed) == (8, _placed(7, "a"))
    assert journal.lineage.is_valid(Version(1, 7))
    assert reason is ReconfigureReason.START


def test_a_death_freezes_says_so_once_and_asks_at_once() -> None:
    core = _training("a", "b")
    out = _feed(
        core,
        on.member_died("b", certain=True),
        on.member_died("b", certain=True),
    )
    assert out[0] == do.report_failure("b")
    assert out[1] == do.stop_rounds()
    ask = _ask_of(out)
    assert (ask.reason, ask.alive) == (ReconfigureReason.FAILURE, {"h", "a"})
    assert sum(one[0] == "report_failure" for one in out) == 1


def test_the_death_of_somebody_else_changes_nothing() -> None:
    core = _training("a")
    assert _feed(core, on.member_died("b", certain=True)) == []


def test_a_broken_link_waits_for_the_verdict_or_the_link() -> None:
    core = _training("a", "b")
    assert _feed(core, on.link_broke("h", "a")) == [do.stop_rounds()]
    assert core.phase is HolderPhase.SETTLING
    assert _ask_of(_feed(core, on.link_back("h", "a"))).alive == {"h", "a", "b"}


def test_a_round_that_broke_off_waits_for_a_sign() -> None:
    core = _training("a", "b")
    assert _feed(core, on.round_interrupted("no link"), now=1.0) == [do.stop_rounds()]
    assert _tick(core, 1.0 + HOME.verdict_seconds / 2) == []
    ask = _ask_of(_feed(core, on.member_died("b", certain=False), now=2.9))
    assert ask.past.silent == {"b"}


def test_what_breaks_off_again_and_again_ends_the_job() -> None:
    core, now = _training("a"), 1.0
    for _ in range(MAX_FRUITLESS):
        _feed(core, on.round_interrupted("the pipe is blocked"), now=now)
        now += HOME.verdict_seconds
        number = _ask_of(_tick(core, now)).generation
        _feed(core, on.generation_ready(number, _placed(number, "a")), now=now)
    _feed(core, on.round_interrupted("the pipe is blocked"), now=now)
    assert _tick(core, now + HOME.verdict_seconds) == [do.stop_job("the pipe is blocked")]


def test_a_new_step_says_that_it_was_of_use() -> None:
    core, now = _training("a"), 1.0
    for step in range(3 * MAX_FRUITLESS):
        _feed(core, on.round_interrupted("the pipe is blocked"), now=now)
        now += HOME.verdict_seconds
        number = _ask_of(_tick(core, now)).generation
        _feed(core, on.generation_ready(number, _placed(number, "a")), now=now)
        _feed(core, on.step_committed(step + 1), now=now)
    assert core.phase is HolderPhase.TRAINING


def test_who_stands_still_twice_in_a_row_is_left_out_until_it_comes_again() -> None:
    core = _training("a", "b")
    number = _ask_of(_feed(core, on.round_stalled(frozenset({"h", "b"}))))
    assert number.without == frozenset()
    _feed(
        core,
        on.generation_ready(number.generation, _placed(number.generation, "a", "b")),
    )
    again = _ask_of(_feed(core, on.round_stalled(frozenset({"h", "b"}))))
    assert again.without == {"b"}
    _feed(
        core,
        on.generation_ready(again.generation, _placed(again.generation, "a")),
    )
    _feed(core, on.member_died("b", certain=True), on.member_appeared("b"))
    assert _ask_of(_feed(core, on.member_died("a", certain=True))).without == frozenset()


def test_a_link_between_two_others_gets_a_moment() -> None:
    core = _training("a", "b")
    _feed(core, on.link_broke("a", "b"), now=1.0)
    assert core.next_wakeup == 1.0 + HOME.relink_seconds
    assert _tick(core, 1.0 + HOME.relink_seconds / 2) == []
    _ask_of(_tick(core, 1.0 + HOME.relink_seconds))


def test_answers_of_requests_given_up_are_not_taken() -> None:
    core = _training("a")
    _feed(core, on.member_died("a", certain=True))
    old = core.number
    assert _feed(core, _refused(old, "b does not answer", again=True)) == []
    asked = _ask_of(_tick(core, core.next_wakeup))
    assert asked.generation > old
    assert asked.generation >= old + GENERATIONS_PER_REQUEST
    assert _feed(core, on.generation_ready(old, _placed(old, "b"))) == []
    assert core.phase is HolderPhase.ASKING


def test_an_answer_with_a_device_that_died_since_is_asked_again() -> None:
    core = _training("a")
    _feed(core, on.round_stalled())
    _feed(core, on.member_died("b", certain=False))
    out = _feed(core, on.generation_ready(core.number, _placed(core.number, "b")))
    assert _ask_of(out).past.silent == {"b"}


def test_a_device_whose_link_broke_since_may_have_given_up_what_it_prepared() -> None:
    """It may have taken the holder for dead and be back in time to look alive."""
    core = _training("a", "b")
    first = _ask_of(_feed(core, on.round_stalled()))
    _feed(core, on.link_broke("h", "b"), on.link_back("h", "b"))
    again = _ask_of(
        _feed(
            core,
            on.generation_ready(first.generation, _placed(first.generation, "b")),
        )
    )
    assert again.generation > first.generation
    _feed(
        core,
        on.generation_ready(again.generation, _placed(again.generation, "b")),
    )
    assert core.phase is HolderPhase.TRAINING


def test_who_had_a_part_is_remembered_over_plans_and_restarts_until_it_ends() -> None:
    core = _training("a", "b")
    number = _ask_of(_feed(core, on.member_died("b", certain=False))).generation
    out = _feed(core, on.generation_ready(number, _placed(number, "a")))
    journal = _one(out, "write_down")
    assert dict(journal.took_part) == {"h": number, "a": number, "b": 1}

    restarted = _core(journal=journal)
    _start(restarted, 0.0)
    past = _ask_of(_feed(restarted, on.member_appeared("a"))).past
    assert (past.silent, past.took_part) == ({"b"}, {"h", "a", "b"})
    _feed(
        restarted,
        on.member_died("b", certain=True),
        on.member_died("a", certain=False),
    )
    _feed(restarted, _refused(restarted.number, "b does not answer", again=True))
    assert _ask_of(_tick(restarted, 9.0)).past.took_part == {"h", "a"}


def test_state_that_may_come_back_is_waited_for() -> None:
    core = _training("a")
    _feed(core, on.member_died("a", certain=False))
    lost = StateLost((2, 3), ("a",), certain=False, reason="gone")
    assert _feed(core, _refused(core.number, "gone", lost)) == [do.report_waiting(("a",))]
    assert core.phase is HolderPhase.WAITING
    assert _ask_of(_feed(core, on.member_appeared("a"))).past.silent == set()


def test_who_ended_for_certain_while_a_request_was_answered_is_not_waited_for() -> None:
    """It was found before; asked for again it is known."""
    core = _training("a", "b")
    _feed(
        core,
        on.member_died("b", certain=False),
        on.member_died("b", certain=True),
    )
    lost = StateLost((2, 3), ("b",), certain=False, reason="gone")
    assert _feed(core, _refused(core.number, "gone", lost), now=2.0) == []
    assert core.phase is HolderPhase.ASKING
    assert _ask_of(_tick(core, 2.0 + RETRY_SECONDS)).past.silent == set()


def test_who_is_silent_while_no_plan_fits_without_it_is_named() -> None:
    core = _training("a", "b")
    _feed(core, on.member_died("b", certain=False))
    refused = _refused(core.number, "too little memory")
    assert _feed(core, refused) == [do.report_waiting(("b",))]
    assert core.next_wakeup == float("inf")
    assert "b" in _ask_of(_feed(core, on.member_appeared("b"))).alive


def test_who_is_alive_and_gave_no_answer_is_named_and_asked_again() -> None:
    core = _training("a", "b")
    _feed(core, on.link_broke("h", "b"), on.link_back("h", "b"))
    lost = StateLost((2, 3), ("b",), certain=False, reason="gone")
    out = _feed(core, _refused(core.number, "gone", lost), now=2.0)
    assert out == [do.report_waiting(("b",))]
    assert core.next_wakeup == 2.0 + RETRY_SECONDS
    waits: list[float] = []
    for _ in range(6):  # each time the numbers are written down
        now = core.next_wakeup
        _tick(core, now)
        _feed(core, _refused(core.number, "gone", lost), now=now)
        waits.append(core.next_wakeup - now)
    assert waits == [2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    assert _ask_of(_feed(core, on.member_appeared("b"), now=core.next_wakeup - 7.0)), (
        "it is not waited out"
    )


def test_state_that_is_gone_for_certain_ends_the_job() -> None:
    core = _training("a")
    _feed(core, on.member_died("a", certain=True))
    lost = StateLost((2, 3), ("a",), certain=True, reason="gone")
    assert _feed(core, _refused(core.number, "gone", lost)) == [do.stop_job("gone", lost)]
    assert _feed(core, on.member_appeared("a")) == []


def test_a_leaver_goes_once_an_generation_without_it_is_in_force() -> None:
    core = _training("a")
    assert _feed(core, on.change_wanted(ReconfigureReason.LEAVE, "a")) == [do.drain_rounds()]
    out = _feed(core, on.rounds_drained())
    assert out[0] == do.stop_rounds()
    ask = _ask_of(out)
    assert (ask.reason, ask.without) == (ReconfigureReason.LEAVE, {"a"})
    out = _feed(core, on.generation_ready(core.number, _placed(core.number, "b")))
    assert out[-1] == do.grant_leave("a")


def test_who_has_no_part_may_leave_at_once() -> None:
    core = _training("a")
    assert _feed(core, on.change_wanted(ReconfigureReason.LEAVE, "b")) == [do.grant_leave("b")]
    assert core.phase is HolderPhase.TRAINING


def test_a_leaver_stays_until_what_it_had_is_kept_elsewhere() -> None:
    core = _training("a", "b")
    _feed(
        core,
        on.change_wanted(ReconfigureReason.LEAVE, "a"),
        on.rounds_drained(),
    )
    placed = replace(_placed(70, "b"), keeps=True)
    out = _feed(core, on.generation_ready(core.number, placed))
    assert do.grant_leave("a") not in out
    assert do.grant_leave("a") in _feed(core, on.snapshot_stable(Version(0, 70)))


def test_who_wants_to_leave_while_a_plan_is_made_drains_that_one() -> None:
    core = _training("a", "b")
    _feed(core, on.member_died("b", certain=True))
    assert _feed(core, on.change_wanted(ReconfigureReason.LEAVE, "a")) == []
    out = _feed(core, on.generation_ready(core.number, _placed(70, "a")))
    assert out[-1] == do.drain_rounds()


def test_a_death_while_a_change_is_asked_for_is_a_failure() -> None:
    core = _training("a", "b")
    _feed(core, on.change_wanted(ReconfigureReason.DRIFT), on.rounds_drained())
    assert do.report_failure("b") in _feed(core, on.member_died("b", certain=True))
    out = _feed(core, on.generation_ready(core.number, _placed(70, "a")))
    begin = next(one for one in out if one[0] == "begin")
    assert begin[2] is ReconfigureReason.FAILURE


def test_a_leaver_that_was_started_again_meanwhile_is_asked_for_a_plan_with_it() -> None:
    """That there is none without it ends no job; where it stays away the next answer does."""
    for comes_back in (True, False):
        core = _training("a", "b")
        ask = _ask_of(
            _feed(core, on.change_wanted(ReconfigureReason.LEAVE, "b"), on.rounds_drained())
        )
        _feed(core, on.member_died("b", certain=True))
        if comes_back:
            _feed(core, on.member_appeared("b"))
        again = _ask_of(_feed(core, _refused(ask.generation, "too little memory")))
        assert (ask.without, again.without, "b" in again.alive) == ({"b"}, set(), comes_back)
        out = _feed(core, _refused(again.generation, "too little memory"))
        assert out == [do.stop_job("too little memory", None)]


def test_a_death_while_a_leaver_drains_is_a_failure() -> None:
    core = _training("a", "b")
    _feed(core, on.change_wanted(ReconfigureReason.LEAVE, "a"))
    ask = _ask_of(_feed(core, on.member_died("b", certain=True)))
    assert (ask.reason, ask.without) == (ReconfigureReason.FAILURE, {"a"})


def test_a_holder_started_again_believes_nothing_lost_that_it_has_not_seen() -> None:
    journal = NotedHistory(90, Lineage().begun(7, _FIRST), _placed(7, "a", "b"), None)
    core = _core(5, journal)
    assert _start(core, 10.0) == []
    _feed(core, on.member_appeared("a"), now=10.1)
    ask = _ask_of(_tick(core, 13.0))
    assert (ask.generation, ask.past.silent, ask.past.reported) == (90, {"b"}, 5)


def test_what_the_others_have_was_reported_though_a_power_cut_has_lost_that() -> None:
    journal = NotedHistory(90, Lineage().begun(7, _FIRST), _placed(7, "a"), None)
    core = _core(5, journal)
    _start(core, 10.0)
    _feed(core, on.member_appeared("a"), now=10.1)
    later = replace(_placed(90, "a"), version=Version(8, 7))
    _feed(
        core,
        on.generation_ready(core.number, later),
        now=11.0,
    )
    ask = _ask_of(_feed(core, on.member_died("a", certain=True), now=12.0))
    assert ask.past.reported == 8


def test_numbers_of_a_first_plan_that_never_came_are_not_used_again() -> None:
    core = _core(journal=NotedHistory(65, Lineage(), None, None))
    _feed(core, on.member_appeared("a"))
    ask = _ask_of(_start(core, 10.0))
    assert (ask.generation, ask.reason) == (65, ReconfigureReason.START)


def test_it_starts_as_soon_as_all_are_back() -> None:
    journal = NotedHistory(90, Lineage().begun(7, _FIRST), _placed(7, "a"), None)
    core = _core(5, journal)
    _start(core, 10.0)
    _ask_of(_feed(core, on.member_appeared("a"), now=10.1))


def test_a_holder_that_was_alone_in_its_plan_waits_for_others_all_the_same() -> None:
    """One of them may have fetched all of it for a plan that never began."""
    alone = replace(_placed(7), stages=(PlacedStage(0, 4, ("h",)),))
    journal = NotedHistory(90, Lineage().begun(7, _FIRST), alone, None)
    core = _core(5, journal)
    assert _start(core, 10.0) == []
    assert _feed(core, on.member_appeared("a"), now=10.1) == []
    assert _ask_of(_tick(core, 10.0 + START_SECONDS)).alive == {"h", "a"}


def test_it_asks_once_where_all_are_here_before_it_starts() -> None:
    journal = NotedHistory(90, Lineage().begun(7, _FIRST), _placed(7, "a"), None)
    core = _core(5, journal)
    assert _feed(core, on.member_appeared("a"), now=12.0) == []
    assert _ask_of(_start(core, 10.0)).alive == {"h", "a"}
    assert core.next_wakeup == float("inf")


def test_a_death_while_the_weights_come_home_does_not_end_the_job() -> None:
    core = _training("a")
    assert _feed(core, on.steps_done()) == [do.collect_weights(_placed(1, "a"))]
    _ask_of(_feed(core, on.member_died("a", certain=True)))
    assert _feed(core, on.weights_home()) == []
    out = _feed(core, on.generation_ready(core.number, _placed(core.number, "b")))
    assert out[-1][0] == "collect_weights"
    assert _feed(core, on.weights_home()) == [do.stop_job()]


def test_spoiled_preparations_are_asked_for_again_ever_later_and_not_for_ever() -> None:
    core, now, waits = _training("a"), 10.0, []
    _feed(
        core,
        on.member_died("b", certain=False),
        on.link_broke("h", "a"),
        on.link_back("h", "a"),
        now=now,
    )
    out: list[Any] = []
    while core.phase is HolderPhase.ASKING:
        why = "8 attempts failed: a could not deliver"
        refused = _refused(core.number, why, again=True, spoiled=8)
        out = _feed(core, refused, now=now)
        if core.phase is HolderPhase.ASKING:
            waits.append(core.next_wakeup - now)
            now = core.next_wakeup
            _ask_of(_tick(core, now))
    assert waits == [RETRY_SECONDS * 2**n for n in range(MAX_SPOILED)]
    [stop] = out
    assert stop[0] == "stop_job"
    assert stop[1].endswith("a could not deliver")


def test_what_may_pass_is_asked_for_again_without_limit() -> None:
    core, now = _training("a"), 10.0
    _feed(core, on.link_broke("h", "a"), on.link_back("h", "a"), now=now)
    for _ in range(10 * MAX_SPOILED):
        _feed(core, _refused(core.number, "it does not answer", again=True), now=now)
        assert core.next_wakeup == now + RETRY_SECONDS
        now = core.next_wakeup
        _ask_of(_tick(core, now))


def test_a_card_that_was_short_is_remembered_when_the_host_is() -> None:
    core = _training("a", "b")
    for memory in (MemoryBudgets(5, 10), MemoryBudgets(10, 4)):
        _feed(core, on.out_of_memory("a", memory))
    assert core.lowered == {"a": MemoryBudgets(5, 4)}


def test_memory_that_a_refused_request_found_missing_is_remembered() -> None:
    core = _training("a")
    _feed(core, on.link_broke("h", "a"), on.link_back("h", "a"))
    for bytes_ in (7, 9):
        refused = _refused(
            core.number, "", again=True, spoiled=8, lowered={"a": MemoryBudgets(bytes_)}
        )
        _feed(core, refused)
        assert _ask_of(_tick(core, core.next_wakeup)).lowered == {"a": MemoryBudgets(7)}


def test_a_leaver_without_whom_no_plan_fits_hears_so_and_all_goes_on_with_it() -> None:
    core = _training("a", "b")
    assert _feed(core, on.change_wanted(ReconfigureReason.LEAVE, "b")) == [do.drain_rounds()]
    ask = _ask_of(_feed(core, on.rounds_drained()))
    assert ask.without == {"b"}
    out = _feed(core, _refused(ask.generation, "too little memory"))
    assert out[0] == do.deny_leave("b", "too little memory")
    again = _ask_of(out)
    assert (again.reason, again.without) == (ReconfigureReason.LEAVE, frozenset())
    _feed(
        core,
        on.generation_ready(again.generation, _placed(again.generation, "a", "b")),
    )
    assert core.phase is HolderPhase.TRAINING
    # it goes all the same: a failure like any other
    assert do.report_failure("b") in _feed(core, on.member_died("b", certain=True))


def _begins(core: HolderCore, first: int, *devices: str, step: int = 0) -> None:
    """Another generation, whose last stage has units [first, 4)."""
    stages = (PlacedStage(0, first, ("h",)), PlacedStage(first, 4, devices))
    version = Version(step, 0)
    placed = Placement(core.number, "h", version, Lineage(), stages)
    begun = _feed(core, on.generation_ready(core.number, placed))
    assert any(one[0] == "begin" for one in begun)


def _dies(core: HolderCore, device: str, *, left: bool = False) -> list[Any]:
    return _feed(core, on.member_died(device, certain=True, left=left))


def test_a_part_that_ends_two_devices_right_after_beginning_ends_the_job() -> None:
    core = _training("a")
    assert _ask_of(_dies(core, "a"))
    _begins(core, 1, "b")
    out = _dies(core, "b")
    assert out[-1] == do.end_part(2, 4, ("a", "b")), "the units that both had"
    assert core.phase is HolderPhase.OVER


def test_a_group_may_end_at_once_of_a_part() -> None:
    core = _training("a", "b")
    out = _feed(core, *(on.member_died(device, certain=True) for device in "aab"))
    assert out[-1] == do.end_part(2, 4, ("a", "b"))


def test_a_job_that_has_ended_waits_for_nothing() -> None:
    core = _training("a", "b")
    number = _ask_of(_dies(core, "a")).generation
    _feed(core, _refused(number, "no link", again=True))
    assert core.next_wakeup < float("inf")
    _dies(core, "b")
    assert core.phase is HolderPhase.OVER
    assert core.next_wakeup == float("inf")


def test_a_device_that_ends_of_its_part_twice_ends_the_job_too() -> None:
    core = _training("a")
    _dies(core, "a")
    _feed(core, on.member_appeared("a"))
    _begins(core, 3, "a")
    assert _dies(core, "a")[-1] == do.end_part(3, 4, ("a", "a"))


def test_deaths_that_say_nothing_of_a_part_end_no_job() -> None:
    core = _training("a")
    _dies(core, "a", left=True)
    _begins(core, 2, "b")
    assert _ask_of(_feed(core, on.member_died("b", certain=False))), "out of reach"
    _feed(core, on.member_appeared("a"), on.member_appeared("b"))
    _begins(core, 2, "a")
    assert _ask_of(_dies(core, "a"))
    _begins(core, 2, "b")
    for step in range(1, EARLY_STEPS + 1):
        _feed(core, on.step_committed(step))
    assert _ask_of(_dies(core, "b")), "not right after beginning"
    _feed(core, on.member_appeared("a"), on.member_appeared("b"))
    _begins(core, 2, "a", step=EARLY_STEPS)
    assert _ask_of(_dies(core, "a")), "the one before is forgotten"


def test_parts_that_have_no_unit_in_common_are_not_to_blame() -> None:
    core = _training("a")
    _dies(core, "a")
    stages = (PlacedStage(0, 2, ("b",)), PlacedStage(2, 4, ("h",)))
    placed = Placement(core.number, "h", _FIRST, Lineage(), stages)
    _feed(core, on.generation_ready(core.number, placed))
    assert _ask_of(_dies(core, "b"))
