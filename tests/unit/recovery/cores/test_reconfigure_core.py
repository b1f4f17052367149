"""One request, whatever happens on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.plan.types.memory_budgets import MemoryBudgets, MemoryShortage
from p2ptrain.recovery.choose_version import FullSnapshot, KnownPast, RollForward
from p2ptrain.recovery.compute_kind import ComputeKind
from p2ptrain.recovery.cores.reconfigure_core import (
    ATTEMPTS_LIMIT,
    COPY_TRIES,
    ChangeCore,
    MakePlan,
)
from p2ptrain.recovery.generation_request import (
    GenerationRequest,
    PrepareFailed,
    ReconfigureFailure,
    ReconfigureReason,
)
from p2ptrain.recovery.placement import PlacedStage, Placement
from p2ptrain.recovery.rebuild_plan import Rebuild
from p2ptrain.recovery.state_report import ReplayWindow, StateEntry, StateKind, StateReport
from p2ptrain.recovery.version import Era, Lineage, Version
from tests.unit.recovery.cores.recorded_port import Asked, RecordedPort

_ALL = frozenset("hab")
_LINEAGE = Lineage((Era(1, 0, 0),))
_STAGES = (PlacedStage(0, 2, ("h",), "a"), PlacedStage(2, 4, ("a",), "h"))
_PRESENT = Placement(1, "h", Version(0, 0), Lineage(), _STAGES)

SHORT = MemoryShortage(MemoryBudgets(7))


class _Change(ChangeCore):
    """One that has begun, with what it has had done."""

    def __init__(
        self, ask: GenerationRequest, alive: frozenset[str] = _ALL, *, gathers: bool = False
    ) -> None:
        self.port = RecordedPort()
        super().__init__(ask, alive, self.port, gathers=gathers)
        self.start()
        self.begun = self.taken()

    def taken(self) -> list[Asked]:
        return self.port.taken()

    def reports(self, *reports: StateReport) -> list[Asked]:
        """Those of the present attempt."""
        generation = self.generation
        for report in reports:
            self.state_reported(generation, report)
        return self.taken()

    def plan_for(self, *reports: StateReport) -> MakePlan:
        """What is to be planned for, with these."""
        [(what, make)] = self.reports(*reports)
        assert what == "make_plan"
        assert isinstance(make, MakePlan)
        return make

    def plans(self, stages: tuple[PlacedStage, ...] = _STAGES) -> Placement:
        """What is to be prepared for the plan."""
        self.planned(self.generation, stages)
        [(what, placed, _, gathers)] = self.taken()
        assert (what, gathers) == ("prepare", False)
        assert isinstance(placed, Placement)
        return placed

    def fails(self, device: str, trouble: PrepareFailed) -> list[Asked]:
        self.ready(self.generation, device, trouble)
        return self.taken()


def _core(
    alive: frozenset[str] = _ALL,
    stable: Version | None = None,
    *,
    gathers: bool = False,
    took_part: frozenset[str] = _ALL,
) -> _Change:
    first = FullSnapshot(Version(0, 0), "h", StateKind.INITIAL)
    past = KnownPast(_LINEAGE, 5, (first,), _PRESENT.places(), took_part=took_part)
    ask = GenerationRequest(10, ReconfigureReason.FAILURE, 4, "h", _ALL, past, _PRESENT, stable)
    return _Change(ask, alive, gathers=gathers)


def _in(device: str, *entries: StateEntry, linked: str = "hab") -> StateReport:
    return StateReport(device, 0, entries, frozenset(linked))


def _live(first: int, end: int, step: int, *, ready: bool = False) -> StateEntry:
    following = Version(step + 1, 1) if ready else None
    return StateEntry(first, end, Version(step, 1), StateKind.LIVE, following)


def _asks(devices: str, generation: int) -> list[Asked]:
    return [("ask_state", device, generation) for device in devices]


_WELL = (_in("h", _live(0, 2, 5)), _in("a", _live(2, 4, 5)), _in("b"))


def _planned() -> _Change:
    core = _core()
    core.reports(*_WELL)
    core.plans()
    return core


def test_the_way_to_an_answer() -> None:
    core = _core()
    assert core.begun == _asks("abh", 10)
    assert core.plan_for(*_WELL).present == _PRESENT  # nothing speaks against it
    placed = core.plans()
    assert (placed.generation, placed.version) == (10, Version(5, 1))
    core.ready(10, "h", None)
    assert core.taken() == []
    core.ready(10, "a", None)
    [(what, placed, _)] = core.taken()
    assert (what, placed.generation) == ("generation_ready", 10)
    assert core.over


@pytest.mark.parametrize("step", [5, 6, 10**6])
def test_who_had_no_part_has_nothing_to_go_on_from(step: int) -> None:
    """Whatever it says that it has: nobody would know whose weights these are."""
    core = _core(took_part=frozenset("ha"))
    said = tuple(
        StateEntry(0, 4, Version(step, 1), kind) for kind in (StateKind.LIVE, StateKind.REPLICA)
    )
    plan = core.plan_for(*_WELL[:2], _in("b", *said))
    assert plan.choice.version == Version(5, 1)
    assert plan.choice.places == (("h",), ("h",), ("a",), ("a",))


def test_updates_that_were_never_ordered_are_not_believed() -> None:
    first = FullSnapshot(Version(0, 0), "h", StateKind.INITIAL)
    past = KnownPast(_LINEAGE, 5, (first,), _PRESENT.places(), most_step=6)
    core = _Change(GenerationRequest(10, ReconfigureReason.FAILURE, 4, "h", _ALL, past, _PRESENT))
    said = StateEntry(0, 4, Version(7, 1), StateKind.LIVE)
    plan = core.plan_for(_WELL[0], _in("a", _live(2, 4, 5), said), _in("b"))
    assert plan.choice.version == Version(5, 1)


def test_who_is_behind_applies_and_is_asked_again() -> None:
    core = _core()
    asked = core.reports(_WELL[0], _in("a", _live(2, 4, 4, ready=True)), _in("b"))
    assert asked == [("ask_state", "a", 10, RollForward(("a",), Version(5, 1), None))]
    core.plan_for(_WELL[1])


def test_who_does_not_apply_is_not_asked_for_ever() -> None:
    core = _core()
    behind = _in("a", _live(2, 4, 4, ready=True))
    core.reports(_WELL[0], behind, _in("b"))
    assert core.reports(behind) == _asks("abh", 11)


def _with_a_copy(device: str, *entries: StateEntry) -> StateReport:
    """Its log goes back to the beginning."""
    return StateReport(device, 0, entries, frozenset("hab"), logged=ReplayWindow(1, 0))


_KEPT = StateEntry(2, 4, Version(2, 1), StateKind.REPLICA)
_MADE = StateEntry(2, 4, Version(5, 1), StateKind.FETCHED)


def test_a_lost_stage_is_rebuilt_before_the_plan() -> None:
    core = _core(frozenset("hb"))
    asked = core.reports(_in("b"), _with_a_copy("h", _live(0, 2, 5), _KEPT))
    made = Rebuild("h", 1, 2, 4, 1, Version(2, 1), Version(5, 1))
    assert asked == [("ask_state", "h", 10, made)]
    plan = core.plan_for(_with_a_copy("h", _live(0, 2, 5), _KEPT, _MADE))
    assert (plan.choice.version, plan.choice.replayed) == (Version(5, 1), 0)


def test_who_cannot_make_it_is_not_asked_again() -> None:
    core = _core(frozenset("hb"))
    core.reports(_in("b"), _with_a_copy("h", _live(0, 2, 5), _KEPT))
    plan = core.plan_for(_with_a_copy("h", _live(0, 2, 5), _KEPT))
    assert plan.choice.version == Version(0, 0)  # the first weights


def test_one_that_gathers_everything_rebuilds_nothing() -> None:
    core = _core(frozenset("hb"), gathers=True)
    [(what, *_, gathers)] = core.reports(_in("b"), _with_a_copy("h", _live(0, 2, 5), _KEPT))
    assert (what, gathers) == ("prepare", True)


def test_a_death_while_preparing_begins_again_with_the_next_number() -> None:
    core = _planned()
    core.gone("a")
    assert core.taken() == _asks("bh", 11)
    core.ready(10, "h", None)  # of the attempt that was given up
    assert core.taken() == []


def test_a_device_short_of_memory_is_planned_for_with_less() -> None:
    core = _planned()
    core.fails("a", PrepareFailed("too little", short=SHORT))
    plan = core.plan_for(_in("h", _live(0, 2, 5), _live(2, 4, 5)), _in("a"), _in("b"))
    assert plan.lowered == {"a": SHORT.has}
    assert plan.present is None


def test_nothing_is_planned_for_a_device_without_a_link_to_the_others() -> None:
    core = _core()
    plan = core.plan_for(_in("h", _live(0, 4, 5)), _in("a"), _in("b", linked="h"))
    assert plan.devices == {"h", "a"}
    assert plan.left_out == {"b": ("a",)}


def test_without_the_holder_there_is_no_answer() -> None:
    core = _core()
    core.reports(_in("a"), _in("b"))
    core.no_report(10, "h")
    assert _refused(core.taken()).again


def _refused(asked: list[Asked]) -> ReconfigureFailure:
    [(what, failure)] = asked
    assert what == "refused"
    assert isinstance(failure, ReconfigureFailure)
    return failure


def _tried_in_vain(trouble: PrepareFailed) -> ReconfigureFailure:
    """Every attempt ends by that."""
    core, asked = _core(), []
    for _ in range(ATTEMPTS_LIMIT + 1):
        core.reports(_in("h", _live(0, 4, 5)), _in("a"), _in("b"))
        core.plans()
        asked = core.fails("a", trouble)
    return _refused(asked)


@pytest.mark.parametrize("is_link", [False, True])
def test_an_error_that_stays_ends_the_attempts(is_link: bool) -> None:
    """And the job, unless it was only that links ended again and again."""
    refusal = _tried_in_vain(PrepareFailed("no such operator", is_link=is_link))
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
        (Version(4, 1), "", False),  # whichever device dies next, one goes back to it
        (Version(4, 1), "a", True),
        (Version(4, 7), "", True),  # of another history
    ],
)
def test_what_a_generation_begins_with_is_kept_unless_something_is_already(
    stable: Version | None, lost: str, keeps: bool
) -> None:
    core = _core(stable=stable)
    kept = stable or Version(4, 1)
    held = {
        "h": (_live(0, 2, 5), *_copies(0, 2, kept)),
        "a": (_live(2, 4, 5), *_copies(2, 4, kept)),
    }
    said = [_in(d, *(one[:1] if d == lost else one)) for d, one in held.items()]
    core.plan_for(*said, _in("b"))
    placed = core.plans()
    assert placed.stable == stable
    assert placed.keeps == keeps


def test_the_first_weights_are_not_kept_the_holder_has_them() -> None:
    core = _core()
    core.plan_for(_in("h"), _in("a"), _in("b"))
    placed = core.plans()
    assert placed.version == Version(0, 0)
    assert not placed.keeps


_SCATTERED = (
    _in("h", _live(0, 2, 5), linked="hb"),
    _in("b", StateEntry(2, 4, Version(5, 1), StateKind.REPLICA), linked="hb"),
)


def test_where_all_is_gathered_first_everything_comes_from_the_device_with_the_data() -> None:
    core = _core(frozenset("hb"), gathers=True)
    [(what, placed, fetches, gathers)] = core.reports(*_SCATTERED)
    assert (what, placed.generation, gathers) == ("prepare", 10, True)
    assert placed.stages == (PlacedStage(0, 4, ("h",)),)
    assert [(f.first, f.end, f.peer) for f in fetches["h"]] == [(0, 2, "h"), (2, 4, "b")]
    core.ready(10, "h", None)
    assert core.taken() == _asks("bh", 11)
    gathered = (_live(0, 2, 5), StateEntry(2, 4, Version(5, 1), StateKind.FETCHED))
    plan = core.plan_for(_in("h", *gathered, linked="hb"), _SCATTERED[1])
    assert plan.choice.places == (("h",),) * 4
    core.planned(11, (PlacedStage(0, 2, ("h",)), PlacedStage(2, 4, ("b",))))
    [(_, _, fetches, gathers)] = core.taken()
    assert not gathers
    assert [(f.first, f.end, f.peer) for f in fetches["b"]] == [(2, 4, "h")]


def test_what_could_not_be_gathered_is_looked_for_again() -> None:
    core = _core(frozenset("hb"), gathers=True)
    core.reports(*_SCATTERED)
    assert core.fails("h", PrepareFailed("the link broke", source="b")) == _asks("bh", 11)
    [(what, *_, gathers)] = core.reports(*_SCATTERED)
    assert (what, gathers) == ("prepare", True)


def test_nothing_is_gathered_while_every_device_of_the_plan_is_here() -> None:
    assert _core(gathers=True).plan_for(*_WELL).present == _PRESENT


def _with_copies(*steps: int) -> _Change:
    copies = [FullSnapshot(Version(step, 1), "h", StateKind.GLOBAL) for step in steps]
    copies.append(FullSnapshot(Version(0, 0), "h", StateKind.INITIAL))
    past = KnownPast(_LINEAGE, 9, tuple(copies), _PRESENT.places())
    ask = GenerationRequest(10, ReconfigureReason.FAILURE, 4, "h", _ALL, past, _PRESENT)
    return _Change(ask)


def _spoiled_step(core: _Change, trouble: PrepareFailed) -> int:
    """Of the version that one attempt was made for, which ends by that."""
    plan = core.plan_for(_in("h"), _in("a"), _in("b"))
    core.plans()
    core.fails("a", trouble)
    return plan.choice.version.step


def test_a_whole_copy_that_cannot_be_read_gives_way_to_the_next_best() -> None:
    core, damaged = _with_copies(8, 6), PrepareFailed("damaged", source="h")
    steps = [_spoiled_step(core, damaged) for _ in range(3 * COPY_TRIES)]
    assert steps == [8] * COPY_TRIES + [6] * COPY_TRIES + [0] * COPY_TRIES


def test_the_last_whole_copy_is_not_given_up_for_a_link_that_breaks() -> None:
    core, broke = _with_copies(), PrepareFailed("the link broke", source="h")
    assert [_spoiled_step(core, broke) for _ in range(ATTEMPTS_LIMIT)] == [0] * ATTEMPTS_LIMIT


@pytest.mark.parametrize(
    ("trouble", "again"),
    [
        (PrepareFailed("b could not deliver", source="b"), True),
        (PrepareFailed("out of memory", short=SHORT), True),
        (PrepareFailed("no such operator"), False),
    ],
)
def test_what_spoiled_every_preparation_is_said_and_whether_it_may_pass(
    trouble: PrepareFailed, again: bool
) -> None:
    refusal = _tried_in_vain(trouble)
    assert refusal.reason.endswith(trouble.reason)
    assert (refusal.again, bool(refusal.spoiled)) == (again, again)
    has = {} if trouble.short is None else {"a": trouble.short.has}
    assert refusal.lowered == has


def test_a_leave_that_was_refused_leaves_the_plan_as_it_is() -> None:
    past = KnownPast(_LINEAGE, 5, (), _PRESENT.places())
    for without, same in ((frozenset("b"), True), (frozenset("a"), False)):
        ask = GenerationRequest(
            10, ReconfigureReason.LEAVE, 4, "h", _ALL, past, _PRESENT, without=without
        )
        assert (_Change(ask).plan_for(*_WELL).present == _PRESENT) is same


@pytest.mark.parametrize(("kind", "same"), [("cpu", True), ("card", False)])
def test_a_plan_does_not_stay_where_a_device_computes_with_something_else(
    kind: str, same: bool
) -> None:
    """Its accelerator has failed, or it has come back with one."""
    other = replace(_WELL[1], compute=ComputeKind(kind))
    assert (_core().plan_for(_WELL[0], other, _WELL[2]).present == _PRESENT) is same
