"""What a holder does about trouble."""

from __future__ import annotations

from dataclasses import replace

from p2ptrain.recovery.choose_version import Choice, Lost
from p2ptrain.recovery.cores import holder_events as h
from p2ptrain.recovery.cores import holder_instructions as to_do
from p2ptrain.recovery.cores.holder_core import HolderCore, Phase
from p2ptrain.recovery.cores.liveness import MOST_FRUITLESS, RELINK_SECONDS, VERDICT_SECONDS
from p2ptrain.recovery.cores.retry_policy import EARLY_STEPS, MOST_SPOILED, RETRY_SECONDS
from p2ptrain.recovery.generation_request import EPOCHS_A_REQUEST, NoWay, Reason
from p2ptrain.recovery.placement import Placed, PlacedStage
from p2ptrain.recovery.version import Lineage, Version

_FIRST = Version(0, 0)
_CHOICE = Choice(_FIRST, (("h",),) * 4, 0, "")


def _placed(epoch: int, *devices: str) -> Placed:
    stages = (PlacedStage(0, 2, ("h",)), PlacedStage(2, 4, devices))
    return Placed(epoch, "h", _FIRST, Lineage(), stages)


def _feed(
    core: HolderCore, *events: h.HolderEvent, now: float = 1.0
) -> list[to_do.HolderInstruction]:
    return [instruction for event in events for instruction in core.handle(event, now)]


def _ask_of(out: list[to_do.HolderInstruction]) -> to_do.Ask:
    [ask] = [one for one in out if isinstance(one, to_do.Ask)]
    return ask


def _training(*devices: str) -> HolderCore:
    core = HolderCore("h", 4, 0)
    _feed(core, *(h.Appeared(device) for device in "ab"))
    core.start(0.0)
    _feed(core, h.AnswerIn(core.number, _placed(1, *devices), _CHOICE))
    assert core.phase is Phase.TRAINING
    return core


def test_the_journal_comes_before_the_beginning() -> None:
    core = HolderCore("h", 4, 0)
    _feed(core, h.Appeared("a"))
    reserved, ask = core.start(0.0)
    assert isinstance(reserved, to_do.Journal)
    assert reserved.next_epoch == 1 + EPOCHS_A_REQUEST
    assert isinstance(ask, to_do.Ask)
    journal, begin = _feed(core, h.AnswerIn(core.number, _placed(7, "a"), _CHOICE))
    assert isinstance(journal, to_do.Journal)
    assert (journal.next_epoch, journal.placed) == (8, _placed(7, "a"))
    assert journal.lineage.is_valid(Version(1, 7))
    assert isinstance(begin, to_do.Begin)
    assert begin.reason is Reason.START


def test_a_death_freezes_says_so_once_and_asks_at_once() -> None:
    core = _training("a", "b")
    out = _feed(core, h.Died("b", certain=True), h.Died("b", certain=True))
    assert out[0] == to_do.Failure("b")
    assert out[1] == to_do.Freeze()
    ask = _ask_of(out).ask
    assert (ask.reason, ask.alive) == (Reason.FAILURE, {"h", "a"})
    assert sum(isinstance(one, to_do.Failure) for one in out) == 1


def test_the_death_of_somebody_else_changes_nothing() -> None:
    core = _training("a")
    assert _feed(core, h.Died("b", certain=True)) == []


def test_a_broken_link_waits_for_the_verdict_or_the_link() -> None:
    core = _training("a", "b")
    assert _feed(core, h.LinkTrouble("h", "a")) == [to_do.Freeze()]
    assert core.phase is Phase.SETTLING
    assert _ask_of(_feed(core, h.LinkBack("h", "a"))).ask.alive == {"h", "a", "b"}


def test_a_round_that_broke_off_waits_for_a_sign() -> None:
    core = _training("a", "b")
    assert _feed(core, h.BrokeOff("no link"), now=1.0) == [to_do.Freeze()]
    assert core.tick(1.0 + VERDICT_SECONDS / 2) == []
    ask = _ask_of(_feed(core, h.Died("b", certain=False), now=2.9)).ask
    assert ask.past.silent == {"b"}


def test_what_breaks_off_again_and_again_ends_the_job() -> None:
    core, now = _training("a"), 1.0
    for _ in range(MOST_FRUITLESS):
        _feed(core, h.BrokeOff("the pipe is blocked"), now=now)
        now += VERDICT_SECONDS
        number = _ask_of(core.tick(now)).ask.number
        _feed(core, h.AnswerIn(number, _placed(number, "a"), _CHOICE), now=now)
    _feed(core, h.BrokeOff("the pipe is blocked"), now=now)
    assert core.tick(now + VERDICT_SECONDS) == [to_do.StopJob("the pipe is blocked")]


def test_a_new_step_says_that_it_was_of_use() -> None:
    core, now = _training("a"), 1.0
    for step in range(3 * MOST_FRUITLESS):
        _feed(core, h.BrokeOff("the pipe is blocked"), now=now)
        now += VERDICT_SECONDS
        number = _ask_of(core.tick(now)).ask.number
        _feed(core, h.AnswerIn(number, _placed(number, "a"), _CHOICE), now=now)
        _feed(core, h.Committed(step + 1), now=now)
    assert core.phase is Phase.TRAINING


def test_who_stands_still_twice_in_a_row_is_left_out_until_it_comes_anew() -> None:
    core = _training("a", "b")
    number = _ask_of(_feed(core, h.Stuck(frozenset({"h", "b"})))).ask
    assert number.without == frozenset()
    _feed(core, h.AnswerIn(number.number, _placed(number.number, "a", "b"), _CHOICE))
    again = _ask_of(_feed(core, h.Stuck(frozenset({"h", "b"})))).ask
    assert again.without == {"b"}
    _feed(core, h.AnswerIn(again.number, _placed(again.number, "a"), _CHOICE))
    _feed(core, h.Died("b", certain=True), h.Appeared("b"))
    assert _ask_of(_feed(core, h.Died("a", certain=True))).ask.without == frozenset()


def test_a_link_between_two_others_gets_a_moment() -> None:
    core = _training("a", "b")
    _feed(core, h.LinkTrouble("a", "b"), now=1.0)
    assert core.next_wakeup == 1.0 + RELINK_SECONDS
    assert core.tick(1.0 + RELINK_SECONDS / 2) == []
    _ask_of(core.tick(1.0 + RELINK_SECONDS))


def test_answers_of_requests_given_up_are_not_taken() -> None:
    core = _training("a")
    _feed(core, h.Died("a", certain=True))
    old = core.number
    assert _feed(core, NoWay(old, "b does not answer", again=True)) == []
    asked = _ask_of(core.tick(core.next_wakeup))
    assert asked.ask.number > old
    assert asked.ask.epoch >= old + EPOCHS_A_REQUEST
    assert _feed(core, h.AnswerIn(old, _placed(old, "b"), _CHOICE)) == []
    assert core.phase is Phase.ASKING


def test_an_answer_with_a_device_that_died_since_is_asked_again() -> None:
    core = _training("a")
    _feed(core, h.Stuck())
    _feed(core, h.Died("b", certain=False))
    out = _feed(core, h.AnswerIn(core.number, _placed(core.number, "b"), _CHOICE))
    assert _ask_of(out).ask.past.silent == {"b"}


def test_a_device_whose_link_broke_since_may_have_given_up_what_it_prepared() -> None:
    """It may have taken the holder for dead and be back in time to look alive."""
    core = _training("a", "b")
    first = _ask_of(_feed(core, h.Stuck())).ask
    _feed(core, h.LinkTrouble("h", "b"), h.LinkBack("h", "b"))
    again = _ask_of(_feed(core, h.AnswerIn(first.number, _placed(first.number, "b"), _CHOICE))).ask
    assert again.number > first.number
    _feed(core, h.AnswerIn(again.number, _placed(again.number, "b"), _CHOICE))
    assert core.phase is Phase.TRAINING


def test_who_had_a_part_is_remembered_over_plans_and_restarts_until_it_ends() -> None:
    core = _training("a", "b")
    number = _ask_of(_feed(core, h.Died("b", certain=False))).ask.number
    out = _feed(core, h.AnswerIn(number, _placed(number, "a"), _CHOICE))
    [journal] = [one for one in out if isinstance(one, to_do.Journal)]
    assert dict(journal.took_part) == {"h": number, "a": number, "b": 1}

    restarted = HolderCore("h", 4, 0, journal=journal)
    restarted.start(0.0)
    past = _ask_of(_feed(restarted, h.Appeared("a"))).ask.past
    assert (past.silent, past.took_part) == ({"b"}, {"h", "a", "b"})
    _feed(restarted, h.Died("b", certain=True), h.Died("a", certain=False))
    _feed(restarted, NoWay(restarted.number, "b does not answer", again=True))
    assert _ask_of(restarted.tick(9.0)).ask.past.took_part == {"h", "a"}


def test_state_that_may_come_back_is_waited_for() -> None:
    core = _training("a")
    _feed(core, h.Died("a", certain=False))
    lost = Lost((2, 3), ("a",), certain=False, reason="gone")
    assert _feed(core, NoWay(core.number, "gone", lost)) == [to_do.WaitFor(("a",))]
    assert core.phase is Phase.WAITING
    assert _ask_of(_feed(core, h.Appeared("a"))).ask.past.silent == set()


def test_who_ended_for_certain_while_a_request_was_answered_is_not_waited_for() -> None:
    """It was found before; asked for again it is known."""
    core = _training("a", "b")
    _feed(core, h.Died("b", certain=False), h.Died("b", certain=True))
    lost = Lost((2, 3), ("b",), certain=False, reason="gone")
    assert _feed(core, NoWay(core.number, "gone", lost), now=2.0) == []
    assert core.phase is Phase.ASKING
    assert _ask_of(core.tick(2.0 + RETRY_SECONDS)).ask.past.silent == set()


def test_who_is_silent_while_no_plan_fits_without_it_is_named() -> None:
    core = _training("a", "b")
    _feed(core, h.Died("b", certain=False))
    refused = NoWay(core.number, "too little memory")
    assert _feed(core, refused) == [to_do.WaitFor(("b",))]
    assert core.next_wakeup == float("inf")
    assert "b" in _ask_of(_feed(core, h.Appeared("b"))).ask.alive


def test_who_is_alive_and_gave_no_answer_is_named_and_asked_again() -> None:
    core = _training("a", "b")
    _feed(core, h.LinkTrouble("h", "b"), h.LinkBack("h", "b"))
    lost = Lost((2, 3), ("b",), certain=False, reason="gone")
    out = _feed(core, NoWay(core.number, "gone", lost), now=2.0)
    assert out == [to_do.WaitFor(("b",))]
    assert core.next_wakeup == 2.0 + RETRY_SECONDS
    waits: list[float] = []
    for _ in range(6):  # each time the numbers are written down
        now = core.next_wakeup
        core.tick(now)
        _feed(core, NoWay(core.number, "gone", lost), now=now)
        waits.append(core.next_wakeup - now)
    assert waits == [2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    assert _ask_of(_feed(core, h.Appeared("b"), now=core.next_wakeup - 7.0)), "it is not waited out"


def test_state_that_is_gone_for_certain_ends_the_job() -> None:
    core = _training("a")
    _feed(core, h.Died("a", certain=True))
    lost = Lost((2, 3), ("a",), certain=True, reason="gone")
    assert _feed(core, NoWay(core.number, "gone", lost)) == [to_do.StopJob("gone", lost)]
    assert _feed(core, h.Appeared("a")) == []


def test_a_leaver_goes_once_an_epoch_without_it_is_in_force() -> None:
    core = _training("a")
    assert _feed(core, h.Wanted(Reason.LEAVE, "a")) == [to_do.Drain()]
    out = _feed(core, h.Drained())
    assert out[0] == to_do.Freeze()
    ask = _ask_of(out).ask
    assert (ask.reason, ask.without) == (Reason.LEAVE, {"a"})
    out = _feed(core, h.AnswerIn(core.number, _placed(core.number, "b"), _CHOICE))
    assert out[-1] == to_do.LetGo("a")


def test_who_has_no_part_may_leave_at_once() -> None:
    core = _training("a")
    assert _feed(core, h.Wanted(Reason.LEAVE, "b")) == [to_do.LetGo("b")]
    assert core.phase is Phase.TRAINING


def test_a_leaver_stays_until_what_it_had_is_kept_elsewhere() -> None:
    core = _training("a", "b")
    _feed(core, h.Wanted(Reason.LEAVE, "a"), h.Drained())
    placed = replace(_placed(70, "b"), keeps=True)
    out = _feed(core, h.AnswerIn(core.number, placed, _CHOICE))
    assert to_do.LetGo("a") not in out
    assert to_do.LetGo("a") in _feed(core, h.Stable(Version(0, 70)))


def test_who_wants_to_leave_while_a_plan_is_made_drains_that_one() -> None:
    core = _training("a", "b")
    _feed(core, h.Died("b", certain=True))
    assert _feed(core, h.Wanted(Reason.LEAVE, "a")) == []
    out = _feed(core, h.AnswerIn(core.number, _placed(70, "a"), _CHOICE))
    assert out[-1] == to_do.Drain()


def test_a_death_while_a_change_is_asked_for_is_a_failure() -> None:
    core = _training("a", "b")
    _feed(core, h.Wanted(Reason.DRIFT), h.Drained())
    assert to_do.Failure("b") in _feed(core, h.Died("b", certain=True))
    out = _feed(core, h.AnswerIn(core.number, _placed(70, "a"), _CHOICE))
    begin = next(one for one in out if isinstance(one, to_do.Begin))
    assert begin.reason is Reason.FAILURE


def test_a_death_while_a_leaver_drains_is_a_failure() -> None:
    core = _training("a", "b")
    _feed(core, h.Wanted(Reason.LEAVE, "a"))
    ask = _ask_of(_feed(core, h.Died("b", certain=True))).ask
    assert (ask.reason, ask.without) == (Reason.FAILURE, {"a"})


def test_a_holder_started_again_believes_nothing_lost_that_it_has_not_seen() -> None:
    journal = to_do.Journal(90, Lineage().begun(7, _FIRST), _placed(7, "a", "b"), None)
    core = HolderCore("h", 4, 5, journal=journal)
    assert core.start(10.0) == []
    _feed(core, h.Appeared("a"), now=10.1)
    ask = _ask_of(core.tick(13.0)).ask
    assert (ask.epoch, ask.past.silent, ask.past.reported) == (90, {"b"}, 5)


def test_what_the_others_have_was_told_though_a_power_cut_has_lost_that() -> None:
    journal = to_do.Journal(90, Lineage().begun(7, _FIRST), _placed(7, "a"), None)
    core = HolderCore("h", 4, 5, journal=journal)
    core.start(10.0)
    _feed(core, h.Appeared("a"), now=10.1)
    later = replace(_placed(90, "a"), version=Version(8, 7))
    _feed(core, h.AnswerIn(core.number, later, replace(_CHOICE, version=later.version)), now=11.0)
    ask = _ask_of(_feed(core, h.Died("a", certain=True), now=12.0)).ask
    assert ask.past.reported == 8


def test_numbers_of_a_first_plan_that_never_came_are_not_used_again() -> None:
    core = HolderCore("h", 4, 0, journal=to_do.Journal(65, Lineage(), None, None))
    _feed(core, h.Appeared("a"))
    ask = _ask_of(core.start(10.0)).ask
    assert (ask.epoch, ask.reason) == (65, Reason.START)


def test_it_starts_as_soon_as_all_are_back() -> None:
    journal = to_do.Journal(90, Lineage().begun(7, _FIRST), _placed(7, "a"), None)
    core = HolderCore("h", 4, 5, journal=journal)
    core.start(10.0)
    _ask_of(_feed(core, h.Appeared("a"), now=10.1))


def test_it_asks_once_where_all_are_here_before_it_starts() -> None:
    journal = to_do.Journal(90, Lineage().begun(7, _FIRST), _placed(7, "a"), None)
    core = HolderCore("h", 4, 5, journal=journal)
    assert _feed(core, h.Appeared("a"), now=12.0) == []
    assert _ask_of(core.start(10.0)).ask.alive == {"h", "a"}
    assert core.next_wakeup == float("inf")


def test_a_death_while_the_weights_come_home_does_not_end_the_job() -> None:
    core = _training("a")
    assert _feed(core, h.CourseDone()) == [to_do.BringHome(_placed(1, "a"))]
    _ask_of(_feed(core, h.Died("a", certain=True)))
    assert _feed(core, h.Home()) == []
    out = _feed(core, h.AnswerIn(core.number, _placed(core.number, "b"), _CHOICE))
    assert isinstance(out[-1], to_do.BringHome)
    assert _feed(core, h.Home()) == [to_do.StopJob()]


def test_spoiled_preparations_are_asked_for_again_ever_later_and_not_for_ever() -> None:
    core, now, waits = _training("a"), 10.0, []
    _feed(core, h.Died("b", certain=False), h.LinkTrouble("h", "a"), h.LinkBack("h", "a"), now=now)
    out: list[to_do.HolderInstruction] = []
    while core.phase is Phase.ASKING:
        why = "8 attempts failed: a could not deliver"
        refused = NoWay(core.number, why, again=True, spoiled=8)
        out = _feed(core, refused, now=now)
        if core.phase is Phase.ASKING:
            waits.append(core.next_wakeup - now)
            now = core.next_wakeup
            _ask_of(core.tick(now))
    assert waits == [RETRY_SECONDS * 2**n for n in range(MOST_SPOILED)]
    [stop] = out
    assert isinstance(stop, to_do.StopJob)
    assert stop.reason is not None
    assert stop.reason.endswith("a could not deliver")


def test_what_may_pass_is_asked_for_again_without_limit() -> None:
    core, now = _training("a"), 10.0
    _feed(core, h.LinkTrouble("h", "a"), h.LinkBack("h", "a"), now=now)
    for _ in range(10 * MOST_SPOILED):
        _feed(core, NoWay(core.number, "it does not answer", again=True), now=now)
        assert core.next_wakeup == now + RETRY_SECONDS
        now = core.next_wakeup
        _ask_of(core.tick(now))


def test_memory_that_a_refused_request_found_missing_is_remembered() -> None:
    core = _training("a")
    _feed(core, h.LinkTrouble("h", "a"), h.LinkBack("h", "a"))
    for bytes_ in (7, 9):
        refused = NoWay(core.number, "", again=True, spoiled=8, lowered={"a": bytes_})
        _feed(core, refused)
        assert _ask_of(core.tick(core.next_wakeup)).ask.lowered == {"a": 7}


def test_a_leaver_without_whom_no_plan_fits_hears_so_and_all_goes_on_with_it() -> None:
    core = _training("a", "b")
    assert _feed(core, h.Wanted(Reason.LEAVE, "b")) == [to_do.Drain()]
    ask = _ask_of(_feed(core, h.Drained())).ask
    assert ask.without == {"b"}
    out = _feed(core, NoWay(ask.number, "too little memory"))
    assert out[0] == to_do.StayOn("b", "too little memory")
    again = _ask_of(out).ask
    assert (again.reason, again.without) == (Reason.LEAVE, frozenset())
    _feed(core, h.AnswerIn(again.number, _placed(again.number, "a", "b"), _CHOICE))
    assert core.phase is Phase.TRAINING
    # it goes all the same: a failure like any other
    assert to_do.Failure("b") in _feed(core, h.Died("b", certain=True))


def _begins(core: HolderCore, first: int, *devices: str, step: int = 0) -> None:
    """Another epoch, whose last stage has units [first, 4)."""
    stages = (PlacedStage(0, first, ("h",)), PlacedStage(first, 4, devices))
    version = Version(step, 0)
    placed = Placed(core.number, "h", version, Lineage(), stages)
    choice = Choice(version, (("h",),) * 4, 0, "")
    begun = _feed(core, h.AnswerIn(core.number, placed, choice))
    assert any(isinstance(one, to_do.Begin) for one in begun)


def _dies(core: HolderCore, device: str, *, left: bool = False) -> list[to_do.HolderInstruction]:
    return _feed(core, h.Died(device, certain=True, left=left))


def test_a_part_that_ends_two_devices_right_after_beginning_ends_the_job() -> None:
    core = _training("a")
    assert _ask_of(_dies(core, "a"))
    _begins(core, 1, "b")
    out = _dies(core, "b")
    assert out[-1] == to_do.PartEnds(2, 4, ("a", "b")), "the units that both had"
    assert core.phase is Phase.OVER


def test_a_group_may_end_at_once_of_a_part() -> None:
    core = _training("a", "b")
    out = _feed(core, *(h.Died(device, certain=True) for device in "aab"))
    assert out[-1] == to_do.PartEnds(2, 4, ("a", "b"))


def test_a_device_that_ends_of_its_part_twice_ends_the_job_too() -> None:
    core = _training("a")
    _dies(core, "a")
    _feed(core, h.Appeared("a"))
    _begins(core, 3, "a")
    assert _dies(core, "a")[-1] == to_do.PartEnds(3, 4, ("a", "a"))


def test_deaths_that_say_nothing_of_a_part_end_no_job() -> None:
    core = _training("a")
    _dies(core, "a", left=True)
    _begins(core, 2, "b")
    assert _ask_of(_feed(core, h.Died("b", certain=False))), "out of reach"
    _feed(core, h.Appeared("a"), h.Appeared("b"))
    _begins(core, 2, "a")
    assert _ask_of(_dies(core, "a"))
    _begins(core, 2, "b")
    for step in range(1, EARLY_STEPS + 1):
        _feed(core, h.Committed(step))
    assert _ask_of(_dies(core, "b")), "not right after beginning"
    _feed(core, h.Appeared("a"), h.Appeared("b"))
    _begins(core, 2, "a", step=EARLY_STEPS)
    assert _ask_of(_dies(core, "a")), "the one before is forgotten"


def test_parts_that_have_no_unit_in_common_are_not_to_blame() -> None:
    core = _training("a")
    _dies(core, "a")
    stages = (PlacedStage(0, 2, ("b",)), PlacedStage(2, 4, ("h",)))
    placed = Placed(core.number, "h", _FIRST, Lineage(), stages)
    _feed(core, h.AnswerIn(core.number, placed, _CHOICE))
    assert _ask_of(_dies(core, "b"))
