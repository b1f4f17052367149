"""Which lost stages can be rebuilt, and by whom.

stage 0  h   live at 40, log since 30        stage 2  c   live at 40, log since 30,
stage 1  b   lost                                         b's copy at 30
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import ProtocolError
from p2ptrain.recovery.choose_version import (
    FullSnapshot,
    KnownPast,
    RebuildFirst,
    VersionChoice,
    choose_version,
)
from p2ptrain.recovery.compute_kind import ComputeKind
from p2ptrain.recovery.placement import PlacedStage, Placement
from p2ptrain.recovery.rebuild_plan import Rebuild, plan_rebuilds
from p2ptrain.recovery.recovery_settings import HOME
from p2ptrain.recovery.state_report import ReplayWindow, StateEntry, StateKind, StateReport
from p2ptrain.recovery.version import Era, Lineage, Version

GENERATION, COPIED, NOW = 3, 30, 40
_LINEAGE = Lineage((Era(GENERATION, 20, 0),))
_STAGES = (
    PlacedStage(0, 2, ("h",), "b"),
    PlacedStage(2, 4, ("b",), "c"),
    PlacedStage(4, 6, ("c",), "b"),
)
_PRESENT = Placement(GENERATION, "h", Version(20, 0), Lineage(), _STAGES)


def _v(step: int) -> Version:
    return Version(step, GENERATION)


def _live(first: int, end: int, step: int = NOW) -> StateEntry:
    return StateEntry(first, end, _v(step), StateKind.LIVE)


def _copy(first: int, end: int, version: Version) -> StateEntry:
    return StateEntry(first, end, version, StateKind.REPLICA)


def _has(
    device: str, *entries: StateEntry, since: int = COPIED, generation: int = GENERATION
) -> StateReport:
    return StateReport(device, entries=entries, logged=ReplayWindow(generation, since))


def _reports(*state_reports: StateReport) -> dict[str, StateReport]:
    return {state_report.device: state_report for state_report in state_reports}


LEAST_STEPS = HOME.rebuild_min_steps

_HOLDER = _has("h", _live(0, 2))
_KEEPER = _has("c", _live(4, 6), _copy(2, 4, _v(COPIED)))
_EXPECTED = Rebuild("c", 1, 2, 4, GENERATION, _v(COPIED), _v(NOW))


def _found(
    state_reports: Mapping[str, StateReport], present: Placement | None = _PRESENT
) -> tuple[object, ...]:
    return plan_rebuilds(6, state_reports, _LINEAGE, present)


def test_the_keeper_makes_it_from_what_the_neighbours_sent() -> None:
    assert _found(_reports(_HOLDER, _KEEPER)) == (_EXPECTED,)


@pytest.mark.parametrize(
    "state_reports",
    [
        pytest.param(_reports(_HOLDER, _has("c", _live(4, 6))), id="nobody has a copy"),
        pytest.param(_reports(_has("h", _live(0, 2), since=31), _KEEPER), id="one forgot a step"),
        pytest.param(
            _reports(_has("h", _live(0, 2), generation=2), _KEEPER), id="of another generation"
        ),
        pytest.param(_reports(replace(_HOLDER, logged=None), _KEEPER), id="it has no log"),
        pytest.param(
            _reports(_HOLDER, replace(_KEEPER, logged=ReplayWindow(GENERATION, 31))),
            id="the backup peer does not know what was ordered",
        ),
        pytest.param(_reports(_KEEPER), id="a neighbour is gone too"),
        pytest.param(
            _reports(_HOLDER, _has("c", _live(4, 6), _copy(2, 3, _v(COPIED)))), id="half a copy"
        ),
        pytest.param(
            _reports(_HOLDER, _has("c", _live(4, 6), _copy(2, 4, Version(COPIED, 2)))),
            id="a copy of another history",
        ),
        pytest.param(
            _reports(_HOLDER, _has("c", _live(4, 6), _copy(2, 4, _v(NOW - LEAST_STEPS + 1)))),
            id="too few steps to be worth it",
        ),
        pytest.param(
            _reports(_HOLDER, replace(_KEEPER, compute=ComputeKind("card"))),
            id="the backup peer computes with something else",
        ),
    ],
)
def test_where_something_is_missing_nothing_is_made(state_reports: dict[str, StateReport]) -> None:
    assert _found(state_reports) == ()


def test_stages_whose_gradients_were_summed_with_others_are_not_made() -> None:
    state_reports = _reports(_HOLDER, _KEEPER)
    shared = replace(_STAGES[1], devices=("b", "d"))
    assert _found(state_reports, replace(_PRESENT, stages=(_STAGES[0], shared, _STAGES[2]))) == ()
    assert _found(state_reports, None) == ()


def test_what_an_accelerator_computed_is_made_by_one_of_its_kind() -> None:
    """A copy elsewhere is a state to go back to."""
    stages = (_STAGES[0], replace(_STAGES[1], kinds=("card",)), _STAGES[2])
    present, kept = replace(_PRESENT, stages=stages), _copy(0, 2, _v(COPIED))
    assert _found(_reports(_HOLDER, _KEEPER), present) == ()
    card = replace(_KEEPER, compute=ComputeKind("card"))
    assert _found(_reports(_HOLDER, card), present) == (_EXPECTED,)
    backup_peer = replace(_KEEPER, entries=(*_KEEPER.entries, kept, _copy(4, 6, _v(COPIED))))
    past = KnownPast(_LINEAGE, NOW)
    found = choose_version(6, _reports(_HOLDER, backup_peer), past, present)
    assert isinstance(found, VersionChoice)
    assert found.version == _v(COPIED)


def test_an_generation_s_first_version_will_do() -> None:
    backup_peer = _has("c", _live(4, 6), _copy(2, 4, _PRESENT.version), since=20)
    (found,) = _found(_reports(_has("h", _live(0, 2), since=20), backup_peer))
    assert found == replace(_EXPECTED, version=_PRESENT.version)


def test_the_newest_copy_is_best() -> None:
    both = _has("c", _live(4, 6), _copy(2, 4, _v(COPIED)), _copy(2, 4, _v(35)))
    (found,) = _found(_reports(_HOLDER, both))
    assert found == replace(_EXPECTED, version=_v(35))


def test_each_device_makes_one() -> None:
    """`c` keeps both; of the second, somebody else must have a copy too."""
    stages = (*_STAGES, PlacedStage(6, 8, ("d",), "c"))
    present = replace(_PRESENT, stages=stages)
    backup_peer = _has("c", _live(4, 6), _copy(2, 4, _v(COPIED)), _copy(6, 8, _v(COPIED)))
    assert plan_rebuilds(8, _reports(_HOLDER, backup_peer), _LINEAGE, present) == ()
    holder = _has("h", _live(0, 2), _copy(6, 8, _v(COPIED)))
    found = plan_rebuilds(8, _reports(holder, backup_peer), _LINEAGE, present)
    assert {(one.device, one.stage) for one in found} == {("c", 1), ("h", 3)}


def test_going_back_is_the_choice_only_where_nothing_can_be_made() -> None:
    kept = (
        StateEntry(0, 2, _v(COPIED), StateKind.KEPT),
        StateEntry(4, 6, _v(COPIED), StateKind.KEPT),
    )
    state_reports = _reports(
        replace(_HOLDER, entries=(*_HOLDER.entries, kept[0])),
        replace(_KEEPER, entries=(*_KEEPER.entries, kept[1])),
    )
    past = KnownPast(_LINEAGE, reported=NOW)
    assert choose_version(6, state_reports, past, _PRESENT) == RebuildFirst((_EXPECTED,))
    choice = choose_version(6, state_reports, past)
    assert isinstance(choice, VersionChoice)
    assert (choice.version, choice.replayed) == (_v(COPIED), NOW - COPIED)


def test_what_was_made_counts_as_what_was_there() -> None:
    made = StateEntry(2, 4, _v(NOW), StateKind.FETCHED)
    state_reports = _reports(_HOLDER, replace(_KEEPER, entries=(*_KEEPER.entries, made)))
    choice = choose_version(6, state_reports, KnownPast(_LINEAGE, reported=NOW), _PRESENT)
    assert isinstance(choice, VersionChoice)
    assert (choice.version, choice.replayed) == (_v(NOW), 0)


def test_the_first_weights_are_no_reason_to_go_back_far() -> None:
    first = FullSnapshot(Version(20, 0), "h", StateKind.INITIAL)
    found = choose_version(
        6, _reports(_HOLDER, _KEEPER), KnownPast(_LINEAGE, NOW, (first,)), _PRESENT
    )
    assert found == RebuildFirst((_EXPECTED,))


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_no_step_is_made_that_somebody_has_forgotten(one: int, other: int, copied: int) -> None:
    state_reports = _reports(
        _has("h", _live(0, 2), since=one),
        _has("c", _live(4, 6), _copy(2, 4, _v(copied)), since=other),
    )
    for made in plan_rebuilds(6, state_reports, _LINEAGE, _PRESENT):
        assert max(one, other, 20) <= made.version.step <= NOW - LEAST_STEPS
        assert made.version.step == copied


def test_it_travels() -> None:
    assert Rebuild.read(_EXPECTED.fields()) == _EXPECTED


@pytest.mark.parametrize(
    "change",
    [
        {"stage": -1},
        {"end": _EXPECTED.first},
        {"generation": GENERATION + 1},
        {"version": [NOW, GENERATION]},
        {"target": None},
    ],
)
def test_nonsense_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        Rebuild.read(_EXPECTED.fields() | change)
