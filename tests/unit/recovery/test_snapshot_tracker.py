"""When a version is something to go back to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.recovery.placement import PlacedStage, Placement
from p2ptrain.recovery.snapshot_tracker import (
    SnapshotAbandoned,
    SnapshotComplete,
    SnapshotTracker,
    TryBackupPeer,
)
from p2ptrain.recovery.state_report import StageCopy
from p2ptrain.recovery.version import Lineage, Version

GENERATION = 3
BEGUN = Version(10, 2)
V = Version(12, GENERATION)
CHAIN = (
    PlacedStage(0, 2, ("a",), "b"),
    PlacedStage(2, 4, ("b", "c")),
    PlacedStage(4, 6, ("d",), "c"),
)
ACKNOWLEDGEMENTS = (("b", (0, 2)), ("b", (2, 4)), ("c", (2, 4)), ("c", (4, 6)))


def copy_of(first: int, end: int, version: Version) -> StageCopy:
    """Made in the generation that runs."""
    return StageCopy(GENERATION, first, end, version)


def placed(*stages: PlacedStage, generation: int = GENERATION, keeps: bool = False) -> Placement:
    return Placement(generation, "a", BEGUN, Lineage(), stages or CHAIN, keeps=keeps)


def keeping(*stages: PlacedStage, keeps: bool = False) -> SnapshotTracker:
    found = SnapshotTracker()
    found.begin(placed(*stages, keeps=keeps))
    return found


@given(st.permutations(ACKNOWLEDGEMENTS), st.data())
def test_a_version_is_whole_once_everybody_has_said_so(
    order: list[tuple[str, tuple[int, int]]], data: st.DataObject
) -> None:
    """In any order, however often, and whatever is said of other versions and generations."""
    account = keeping()
    account.ordered(V)
    for number, (device, units) in enumerate(order, start=1):
        twice = data.draw(st.booleans())
        if twice and number < len(order):
            assert account.acknowledged(device, copy_of(*units, V)) == []
        assert account.acknowledged(device, StageCopy(GENERATION - 1, *units, V)) == []
        assert account.acknowledged(device, copy_of(*units, Version(12, 2))) == []
        found = account.acknowledged(device, copy_of(*units, V))
        assert found == ([SnapshotComplete(V)] if number == len(order) else [])
    assert account.under_way == ()
    assert account.acknowledged("b", copy_of(0, 2, V)) == []


def test_only_who_should_have_a_copy_counts() -> None:
    account = keeping()
    account.ordered(V)
    for device, units in (*ACKNOWLEDGEMENTS[1:], ("c", (0, 2)), ("a", (0, 2)), ("b", (0, 3))):
        assert account.acknowledged(device, copy_of(*units, V)) == []
    assert account.acknowledged("b", copy_of(0, 2, V)) == [SnapshotComplete(V)]


def test_what_an_generation_begins_with_may_be_on_its_way_at_once() -> None:
    account = keeping(keeps=True)
    assert account.under_way == (BEGUN,)
    for device, units in ACKNOWLEDGEMENTS[:-1]:
        account.acknowledged(device, copy_of(*units, BEGUN))
    assert account.acknowledged("c", copy_of(4, 6, BEGUN)) == [SnapshotComplete(BEGUN)]


def test_a_plan_without_keepers_keeps_nothing() -> None:
    account = keeping(PlacedStage(0, 3, ("a", "b")), PlacedStage(3, 6, ("c", "d")))
    account.ordered(V)
    assert not account.protects
    assert account.under_way == ()
    assert account.acknowledged("a", copy_of(0, 3, V)) == []


def test_another_keeper_is_tried_and_stays_the_keeper() -> None:
    account = keeping()
    account.ordered(V)
    for device, units in ACKNOWLEDGEMENTS[1:]:
        account.acknowledged(device, copy_of(*units, V))
    # the next stage's other device, then the far one
    assert account.acknowledged("b", copy_of(0, 2, V), "no memory") == [
        TryBackupPeer("a", "c", copy_of(0, 2, V))
    ]
    assert account.acknowledged("b", copy_of(0, 2, V)) == []  # it is not asked any more
    assert account.acknowledged("c", copy_of(0, 2, V)) == [SnapshotComplete(V)]
    later = Version(14, GENERATION)
    account.ordered(later)
    for device, units in ACKNOWLEDGEMENTS[1:]:
        account.acknowledged(device, copy_of(*units, later))
    assert account.acknowledged("c", copy_of(0, 2, later)) == [SnapshotComplete(later)]


def test_when_nobody_can_keep_it_the_version_is_abandoned_and_the_next_one_is_tried() -> None:
    account = keeping(PlacedStage(0, 2, ("a",), "b"), PlacedStage(2, 4, ("b",), "a"))
    account.ordered(V)
    found = account.acknowledged("b", copy_of(0, 2, V), "no memory")
    assert found == [SnapshotAbandoned(V, 0, "b", "no memory")]
    assert account.under_way == ()
    later = Version(14, GENERATION)
    account.ordered(later)
    assert account.acknowledged("b", copy_of(0, 2, later)) == []
    assert account.acknowledged("a", copy_of(2, 4, later)) == [SnapshotComplete(later)]


def test_a_device_without_a_copy_of_its_own_ends_a_version() -> None:
    for device, units in (("a", (0, 2)), ("c", (2, 4))):
        account = keeping()
        account.ordered(V)
        (found,) = account.acknowledged(device, copy_of(*units, V), "no memory")
        assert isinstance(found, SnapshotAbandoned)
        assert account.under_way == ()


def test_an_generation_ends_what_was_on_its_way() -> None:
    account = keeping()
    account.ordered(V)
    account.begin(placed(generation=GENERATION + 1))
    assert account.under_way == ()
    assert account.acknowledged("b", copy_of(0, 2, V)) == []


def test_what_is_on_its_way_is_let_finish_however_fast_others_are_wanted() -> None:
    """Checkpoints may want every version, over a link that takes a while for each."""
    account = keeping()
    became_whole = []
    for step in range(11, 41):
        version = Version(step, GENERATION)
        was_under_way = account.under_way
        assert account.ordered(version) is not bool(was_under_way)
        assert account.under_way == (was_under_way or (version,))
        device, units = ACKNOWLEDGEMENTS[step % len(ACKNOWLEDGEMENTS)]  # a copy takes a round
        for result in account.acknowledged(device, copy_of(*units, account.under_way[0])):
            assert isinstance(result, SnapshotComplete)
            became_whole.append(result.version.step)
    assert became_whole == list(range(11, 39, 4))


def test_what_takes_too_long_is_given_up() -> None:
    account = keeping()
    assert account.give_up("too slow") == []
    account.ordered(V)
    account.acknowledged("b", copy_of(0, 2, V))
    assert account.give_up("too slow") == [SnapshotAbandoned(V, 1, "b", "too slow")]
    assert account.under_way == ()


def test_nobody_speaks_for_a_stage_that_is_not_its_own() -> None:
    account = keeping()
    account.ordered(V)
    for units in ((0, 2), (2, 4), (4, 6)):
        assert account.acknowledged("x", copy_of(*units, V), "no memory") == []
    assert account.acknowledged("a", copy_of(2, 4, V), "no memory") == []
    assert account.under_way == (V,)
