"""One request, whatever happens on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.plan.types.memory_budgets import MemoryBudgets, MemoryShortage
from p2ptrain.recovery.choose_version import FullSnapshot, KnownPast, RollForward
from p2ptrain.recovery.compute_kind import ComputeKind
from p2ptrain.recovery.cores import reconfigure_events
from p2ptrain.recovery.cores.reconfigure_core import ATTEMPTS_LIMIT, COPY_TRIES, ChangeCore
from p2ptrain.recovery.cores.worker_events import PrepareFailed
from p2ptrain.recovery.generation_request import (
    GenerationRequest,
    ReconfigureFailure,
    ReconfigureReason,
)
from p2ptrain.recovery.placement import PlacedStage, Placement
from p2ptrain.recovery.rebuild_plan import Rebuild
from p2ptrain.recovery.state_report import ReplayWindow, StateEntry, StateKind, StateReport
from p2ptrain.recovery.version import Era, Lineage, Version

_ALL = frozenset("hab")
_LINEAGE = Lineage((Era(1, 0, 0),))
_STAGES = (PlacedStage(0, 2, ("h",), "a"), PlacedStage(2, 4, ("a",), "h"))
_PRESENT = Placement(1, "h", Version(0, 0), Lineage(), _STAGES)

SHORT = MemoryShortage(MemoryBudgets(7))


def _core(
    alive: frozenset[str] = _ALL,
    stable: Version | None = None,
    *,
    gathers: bool = False,
    took_part: frozenset[str] = _ALL,
) -> ChangeCore:
    first = FullSnapshot(Version(0, 0), "h", StateKind.INITIAL)
    past = KnownPast(_LINEAGE, 5, (first,), _PRESENT.places(), took_part=took_part)
    ask = GenerationRequest(10, 10, ReconfigureReason.FAILURE, 4, "h", _ALL, past, _PRESENT, stable)
    return ChangeCore(ask, alive, gathers=gathers)


def _in(
    device: str, *holdings: StateEntry, generation: int = 10, linked: str = "hab"
) -> reconfigure_events.StateReported:
    return reconfigure_events.StateReported(
        generation, StateReport(device, 0, holdings, frozenset(linked))
    )


def _live(first: int, end: int, step: int, *, ready: bool = False) -> StateEntry:
    following = Version(step + 1, 1) if ready else None
    return StateEntry(first, end, Version(step, 1), StateKind.LIVE, following)


def _feed(
    core: ChangeCore, *events: reconfigure_events.ChangeEvent
) -> list[reconfigure_events.ChangeInstruction]:
    return [instruction for event in events for instruction in core.handle(event)]


def _planned(core: ChangeCore) -> list[reconfigure_events.ChangeInstruction]:
    core.start()
    _feed(core, _in("h", _live(0, 2, 5)), _in("a", _live(2, 4, 5)), _in("b"))
    return _feed(core, reconfigure_events.PlanMade(10, _STAGES))


def test_the_way_to_an_answer() -> None:
    core = _core()
    assert core.start() == [reconfigure_events.AskStateReport(device, 10) for device in "abh"]
    [plan] = _feed(core, _in("h", _live(0, 2, 5)), _in("a", _live(2, 4, 5)), _in("b"))
    assert isinstance(plan, reconfigure_events.MakePlan)
    assert plan.present == _PRESENT  # nothing speaks against it
    first, second = _feed(core, reconfigure_events.PlanMade(10, _STAGES))
    assert isinstance(first, reconfigure_events.PrepareDevice)
    assert isinstance(second, reconfigure_events.PrepareDevice)
    assert (first.placed.generation, first.placed.version) == (10, Version(5, 1))
    assert _feed(core, reconfigure_events.DeviceReady(10, "h")) == []
    [answer] = _feed(core, reconfigure_events.DeviceReady(10, "a"))
    assert isinstance(answer, reconfigure_events.ReconfigurationReady)
    assert core.over


@pytest.mark.parametrize("step", [5, 6, 10**6])
def test_who_had_no_part_has_nothing_to_go_on_from(step: int) -> None:
    """Whatever it says that it has: nobody would know whose weights these are."""
    core = _core(took_part=frozenset("ha"))
    core.start()
    said = tuple(
        StateEntry(0, 4, Version(step, 1), kind) for kind in (StateKind.LIVE, StateKind.REPLICA)
    )
    parts = (_in("h", _live(0, 2, 5)), _in("a", _live(2, 4, 5)))
    [plan] = _feed(core, *parts, _in("b", *said))
    assert isinstance(plan, reconfigure_events.MakePlan)
    assert plan.choice.version == Version(5, 1)
    assert plan.choice.places == (("h",), ("h",), ("a",), ("a",))


def test_updates_that_were_never_ordered_are_not_believed() -> None:
    first = FullSnapshot(Version(0, 0), "h", StateKind.INITIAL)
    past = KnownPast(_LINEAGE, 5, (first,), _PRESENT.places(), most_step=6)
    core = ChangeCore(
        GenerationRequest(10, 10, ReconfigureReason.FAILURE, 4, "h", _ALL, past, _PRESENT), _ALL
    )
    core.start()
    said = StateEntry(0, 4, Version(7, 1), StateKind.LIVE)
    parts = (_in("h", _live(0, 2, 5)), _in("a", _live(2, 4, 5), said))
    [plan] = _feed(core, *parts, _in("b"))
    assert isinstance(plan, reconfigure_events.MakePlan)
    assert plan.choice.version == Version(5, 1)


def test_who_is_behind_applies_and_is_asked_again() -> None:
    core = _core()
    core.start()
    [ask] = _feed(core, _in("h", _live(0, 2, 5)), _in("a", _live(2, 4, 4, ready=True)), _in("b"))
    assert ask == reconfigure_events.AskStateReport(
        "a", 10, RollForward(("a",), Version(5, 1), None)
    )
    [plan] = _feed(core, _in("a", _live(2, 4, 5)))
    assert isinstance(plan, reconfigure_events.MakePlan)


def test_who_does_not_apply_is_not_asked_for_ever() -> None:
    core = _core()
    core.start()
    behind = _in("a", _live(2, 4, 4, ready=True))
    _feed(core, _in("h", _live(0, 2, 5)), behind, _in("b"))
    out = _feed(core, behind)
    assert out == [reconfigure_events.AskStateReport(device, 11) for device in "abh"]


def _with_a_copy(device: str, *holdings: StateEntry) -> reconfigure_events.StateReported:
    """Its log goes back to the beginning."""
    known = StateReport(device, 0, holdings, frozenset("hab"), logged=ReplayWindow(1, 0))
    return reconfigure_events.StateReported(10, known)


_KEPT = StateEntry(2, 4, Version(2, 1), StateKind.REPLICA)
_MADE = StateEntry(2, 4, Version(5, 1), StateKind.FETCHED)


def test_a_lost_stage_is_made_anew_before_the_plan() -> None:
    core = _core(frozenset("hb"))
    core.start()
    [ask] = _feed(core, _in("b"), _with_a_copy("h", _live(0, 2, 5), _KEPT))
    made = Rebuild("h", 1, 2, 4, 1, Version(2, 1), Version(5, 1))
    assert ask == reconfigure_events.AskStateReport("h", 10, rebuild=made)
    [plan] = _feed(core, _with_a_copy("h", _live(0, 2, 5), _KEPT, _MADE))
    assert isinstance(plan, reconfigure_events.MakePlan)
    assert (plan.choice.version, plan.choice.replayed) == (Version(5, 1), 0)


def test_who_cannot_make_it_is_not_asked_again() -> None:
    core = _core(frozenset("hb"))
    core.start()
    _feed(core, _in("b"), _with_a_copy("h", _live(0, 2, 5), _KEPT))
    [plan] = _feed(core, _with_a_copy("h", _live(0, 2, 5), _KEPT))
    assert isinstance(plan, reconfigure_events.MakePlan)
    assert plan.choice.version == Version(0, 0)  # the first weights


def test_one_that_gathers_everything_makes_nothing_anew() -> None:
    core = _core(frozenset("hb"), gathers=True)
    core.start()
    out = _feed(core, _in("b"), _with_a_copy("h", _live(0, 2, 5), _KEPT))
    assert [type(one) for one in out] == [reconfigure_events.GatherUnits]


def test_a_death_while_preparing_begins_again_with_the_next_number() -> None:
    core = _core()
    _planned(core)
    assert _feed(core, reconfigure_events.MemberGone("a")) == [
        reconfigure_events.AskStateReport(device, 11) for device in "bh"
    ]
    assert (
        _feed(core, reconfigure_events.DeviceReady(10, "h")) == []
    )  # of the attempt that was given up


def test_a_device_short_of_memory_is_planned_for_with_less() -> None:
    core = _core()
    _planned(core)
    _feed(
        core,
        reconfigure_events.DeviceReady(10, "a", PrepareFailed(10, "too little", short=SHORT)),
    )
    live = (_live(0, 2, 5), _live(2, 4, 5))
    [plan] = _feed(
        core, _in("h", *live, generation=11), _in("a", generation=11), _in("b", generation=11)
    )
    assert isinstance(plan, reconfigure_events.MakePlan)
    assert plan.lowered == {"a": SHORT.has}
    assert plan.present is None


def test_nothing_is_planned_for_a_device_without_a_link_to_the_others() -> None:
    core = _core()
    core.start()
    events = (_in("h", _live(0, 4, 5)), _in("a", linked="hab"), _in("b", linked="h"))
    [plan] = _feed(core, *events)
    assert isinstance(plan, reconfigure_events.MakePlan)
    assert plan.devices == {"h", "a"}
    assert plan.left_out == {"b": ("a",)}


def test_without_the_holder_there_is_no_answer() -> None:
    core = _core()
    core.start()
    events = (_in("a"), _in("b"), reconfigure_events.StateReportFailed(10, "h", "no link"))
    [refusal] = _feed(core, *events)
    assert isinstance(refusal, ReconfigureFailure)
    assert refusal.again


@pytest.mark.parametrize("is_link", [False, True])
def test_an_error_that_stays_ends_the_attempts(is_link: bool) -> None:
    """And the job, unless it was only that links ended again and again."""
    core = _core()
    core.start()
    out: list[reconfigure_events.ChangeInstruction] = []
    for generation in range(10, 10 + ATTEMPTS_LIMIT + 1):
        stock = (_in("h", _live(0, 4, 5), generation=generation), _in("a", generation=generation))
        out = _feed(
            core,
            *stock,
            _in("b", generation=generation),
            reconfigure_events.PlanMade(generation, _STAGES),
        )
        failed = PrepareFailed(generation, "no such operator", is_link=is_link)
        out = _feed(core, reconfigure_events.DeviceReady(generation, "a", failed))
    [refusal] = out
    assert isinstance(refusal, ReconfigureFailure)
    assert "no such operator" in refusal.reason
    assert refusal.again == is_link


def _copies(first: int, end: int, version: Version) -> tuple[StateEntry, ...]:
    """Its own, and the other's."""
    own = StateEntry(first, end, version, StateKind.KEPT)
    return own, StateEntry(2 - first, 6 - end, version, StateKind.REPLICA)


@pytest.mark.parametrize(
    ("stable", "lost", "keeps"),
    [
        (None, "", True),
        (Version(4, 1), "", False),  # whoever dies next, one goes back to it
        (Version(4, 1), "a", True),
        (Version(4, 7), "", True),  # of another history
    ],
)
def test_what_an_generation_begins_with_is_kept_unless_something_is_already(
    stable: Version | None, lost: str, keeps: bool
) -> None:
    core = _core(stable=stable)
    core.start()
    kept = stable or Version(4, 1)
    held = {
        "h": (_live(0, 2, 5), *_copies(0, 2, kept)),
        "a": (_live(2, 4, 5), *_copies(2, 4, kept)),
    }
    for device, holdings in held.items():
        _feed(core, _in(device, *(holdings[:1] if device == lost else holdings)))
    _feed(core, _in("b"))
    prepare, _ = _feed(core, reconfigure_events.PlanMade(10, _STAGES))
    assert isinstance(prepare, reconfigure_events.PrepareDevice)
    assert prepare.placed.stable == stable
    assert prepare.placed.keeps == keeps


def test_the_first_weights_are_not_kept_the_holder_has_them() -> None:
    core = _core()
    core.start()
    _feed(core, _in("h"), _in("a"), _in("b"))
    prepare, _ = _feed(core, reconfigure_events.PlanMade(10, _STAGES))
    assert isinstance(prepare, reconfigure_events.PrepareDevice)
    assert prepare.placed.version == Version(0, 0)
    assert not prepare.placed.keeps


def _whole(generation: int) -> reconfigure_events.StateReported:
    """The holder, after it has gathered units 2 and 3."""
    parts = (_live(0, 2, 5), StateEntry(2, 4, Version(5, 1), StateKind.FETCHED))
    return _in("h", *parts, generation=generation, linked="hb")


def test_where_all_is_gathered_first_everything_comes_from_the_device_with_the_data() -> None:
    core = _core(frozenset("hb"), gathers=True)
    core.start()
    kept = StateEntry(2, 4, Version(5, 1), StateKind.REPLICA)
    [gather] = _feed(core, _in("h", _live(0, 2, 5), linked="hb"), _in("b", kept, linked="hb"))
    assert isinstance(gather, reconfigure_events.GatherUnits)
    assert (gather.device, gather.placed.generation) == ("h", 10)
    assert gather.placed.stages == (PlacedStage(0, 4, ("h",)),)
    assert [(f.first, f.end, f.peer) for f in gather.fetches] == [(0, 2, "h"), (2, 4, "b")]
    assert _feed(core, reconfigure_events.DeviceReady(10, "h")) == [
        reconfigure_events.AskStateReport(device, 11) for device in "bh"
    ]
    [plan] = _feed(core, _whole(11), _in("b", kept, generation=11, linked="hb"))
    assert isinstance(plan, reconfigure_events.MakePlan)
    assert plan.choice.places == (("h",),) * 4
    stages = (PlacedStage(0, 2, ("h",)), PlacedStage(2, 4, ("b",)))
    first, second = _feed(core, reconfigure_events.PlanMade(11, stages))
    assert isinstance(first, reconfigure_events.PrepareDevice)
    assert isinstance(second, reconfigure_events.PrepareDevice)
    assert [(f.first, f.end, f.peer) for f in second.fetches] == [(2, 4, "h")]


def test_what_could_not_be_gathered_is_looked_for_again() -> None:
    core = _core(frozenset("hb"), gathers=True)
    core.start()
    kept = StateEntry(2, 4, Version(5, 1), StateKind.REPLICA)
    _feed(core, _in("h", _live(0, 2, 5), linked="hb"), _in("b", kept, linked="hb"))
    asked = _feed(
        core,
        reconfigure_events.DeviceReady(10, "h", PrepareFailed(10, "the link broke", source="b")),
    )
    assert asked == [reconfigure_events.AskStateReport(device, 11) for device in "bh"]
    [again] = _feed(
        core,
        _in("h", _live(0, 2, 5), generation=11, linked="hb"),
        _in("b", kept, generation=11, linked="hb"),
    )
    assert isinstance(again, reconfigure_events.GatherUnits)


def test_nothing_is_gathered_while_every_device_of_the_plan_is_here() -> None:
    core = _core(gathers=True)
    core.start()
    [plan] = _feed(core, _in("h", _live(0, 2, 5)), _in("a", _live(2, 4, 5)), _in("b"))
    assert isinstance(plan, reconfigure_events.MakePlan)
    assert plan.present == _PRESENT


def _spoil(
    core: ChangeCore, generation: int, trouble: PrepareFailed
) -> reconfigure_events.ChangeInstruction:
    """One attempt that ends by that; what is said then, the plan asked for included."""
    stock = (
        _in("h", generation=generation),
        _in("a", generation=generation),
        _in("b", generation=generation),
    )
    [plan] = _feed(core, *stock)
    if not isinstance(plan, reconfigure_events.MakePlan):
        return plan
    _feed(
        core,
        reconfigure_events.PlanMade(generation, _STAGES),
        reconfigure_events.DeviceReady(generation, "a", trouble),
    )
    return plan


def _with_copies(*steps: int) -> ChangeCore:
    copies = [FullSnapshot(Version(step, 1), "h", StateKind.GLOBAL) for step in steps]
    copies.append(FullSnapshot(Version(0, 0), "h", StateKind.INITIAL))
    past = KnownPast(_LINEAGE, 9, tuple(copies), _PRESENT.places())
    ask = GenerationRequest(10, 10, ReconfigureReason.FAILURE, 4, "h", _ALL, past, _PRESENT)
    core = ChangeCore(ask, _ALL)
    core.start()
    return core


def test_a_whole_copy_that_cannot_be_read_gives_way_to_the_next_best() -> None:
    core, steps = _with_copies(8, 6), []
    for generation in range(10, 10 + 3 * COPY_TRIES):
        plan = _spoil(core, generation, PrepareFailed(generation, "damaged", source="h"))
        assert isinstance(plan, reconfigure_events.MakePlan)
        steps.append(plan.choice.version.step)
    assert steps == [8] * COPY_TRIES + [6] * COPY_TRIES + [0] * COPY_TRIES


def test_the_last_whole_copy_is_not_given_up_for_a_link_that_breaks() -> None:
    core = _with_copies()
    for generation in range(10, 10 + ATTEMPTS_LIMIT):
        plan = _spoil(core, generation, PrepareFailed(generation, "the link broke", source="h"))
        assert isinstance(plan, reconfigure_events.MakePlan)
        assert plan.choice.version == Version(0, 0)


@pytest.mark.parametrize(
    ("trouble", "again"),
    [
        (PrepareFailed(0, "b could not deliver", source="b"), True),
        (PrepareFailed(0, "out of memory", short=SHORT), True),
        (PrepareFailed(0, "no such operator"), False),
    ],
)
def test_what_spoiled_every_preparation_is_said_and_whether_it_may_pass(
    trouble: PrepareFailed, again: bool
) -> None:
    core, out = _core(), []
    core.start()
    for generation in range(10, 10 + ATTEMPTS_LIMIT + 1):
        stock = (_in("h", _live(0, 4, 5), generation=generation), _in("a", generation=generation))
        _feed(
            core,
            *stock,
            _in("b", generation=generation),
            reconfigure_events.PlanMade(generation, _STAGES),
        )
        out = _feed(
            core,
            reconfigure_events.DeviceReady(
                generation, "a", replace(trouble, generation=generation)
            ),
        )
    [refusal] = out
    assert isinstance(refusal, ReconfigureFailure)
    assert refusal.reason.endswith(trouble.reason)
    assert (refusal.again, bool(refusal.spoiled)) == (again, again)
    has = {} if trouble.short is None else {"a": trouble.short.has}
    assert refusal.lowered == has


def test_a_leave_that_was_refused_leaves_the_plan_as_it_is() -> None:
    past = KnownPast(_LINEAGE, 5, (), _PRESENT.places())
    for without, same in ((frozenset("b"), True), (frozenset("a"), False)):
        ask = GenerationRequest(
            10, 10, ReconfigureReason.LEAVE, 4, "h", _ALL, past, _PRESENT, without=without
        )
        core = ChangeCore(ask, _ALL)
        core.start()
        stock = (_in("h", _live(0, 2, 5)), _in("a", _live(2, 4, 5)), _in("b"))
        [plan] = _feed(core, *stock)
        assert isinstance(plan, reconfigure_events.MakePlan)
        assert (plan.present == _PRESENT) is same


@pytest.mark.parametrize(("kind", "same"), [("cpu", True), ("card", False)])
def test_a_plan_does_not_stay_where_a_device_computes_with_something_else(
    kind: str, same: bool
) -> None:
    """Its accelerator has failed, or it has come back with one."""
    core = _core()
    core.start()
    other = _in("a", _live(2, 4, 5))
    report = replace(other.inventory, compute=ComputeKind(kind))
    [plan] = _feed(core, _in("h", _live(0, 2, 5)), replace(other, inventory=report), _in("b"))
    assert isinstance(plan, reconfigure_events.MakePlan)
    assert (plan.present == _PRESENT) is same
