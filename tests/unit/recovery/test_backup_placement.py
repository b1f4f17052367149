"""Whose copies are kept where."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.recovery.backup_placement import (
    SLOTS,
    SLOTS_WITH_CHECKPOINTS,
    BackupPlacement,
    KeptBytes,
    UnbackedStage,
    assign_backup_peers,
    backup_peers_of,
    copies_bytes,
    is_covered,
)
from p2ptrain.recovery.placement import PlacedStage
from p2ptrain.recovery.state_report import StateEntry, StateKind, StateReport
from p2ptrain.recovery.version import Version

R = Version(8, 3)
PLENTY = 1 << 40


def pipeline(*devices: str) -> tuple[PlacedStage, ...]:
    """A unit a stage; "bc" is a group of b and c."""
    return tuple(PlacedStage(p, p + 1, tuple(names)) for p, names in enumerate(devices))


def kept_by(found: BackupPlacement) -> list[str | None]:
    return [stage.copies_to for stage in found.stages]


def protected(*devices: str, **spare: int) -> BackupPlacement:
    stages = pipeline(*devices)
    names = {name for stage in stages for name in stage.devices}
    return assign_backup_peers(
        stages, [KeptBytes(100)] * len(stages), dict.fromkeys(names, PLENTY) | spare
    )


def test_the_next_stage_keeps_and_for_the_last_one_the_one_before() -> None:
    found = protected("a", "b", "c")
    assert kept_by(found) == ["b", "c", "b"]
    assert not found.unprotected


def test_copies_take_two_versions_of_what_is_here_and_of_what_is_kept_for_others() -> None:
    """a | b c | d  , of which "bc" is a group: b keeps for a, c for d."""
    stages = protected("a", "bc", "d").stages
    sizes = [KeptBytes(10), KeptBytes(100), KeptBytes(1000)]
    backup_peers = {stages[0].copies_to: 10, stages[2].copies_to: 1000}
    taken = copies_bytes(stages, sizes)
    own = {"a": 10, "b": 100, "c": 100, "d": 1000}
    assert taken == {name: 2 * (size + backup_peers.get(name, 0)) for name, size in own.items()}
    more = copies_bytes(stages, sizes, SLOTS_WITH_CHECKPOINTS)
    assert more == {name: taken[name] + size for name, size in own.items()}


def test_frozen_weights_are_kept_once_and_only_by_those_who_do_not_train_with_them() -> None:
    stages = protected("a", "b").stages
    taken = copies_bytes(stages, [KeptBytes(10, 1000), KeptBytes(100, 20_000)])
    assert taken == {"a": 2 * 10 + 2 * 100 + 20_000, "b": 2 * 100 + 2 * 10 + 1000}
    short = assign_backup_peers(stages, [KeptBytes(10, 1000), KeptBytes(10)], {"a": 100, "b": 1039})
    assert kept_by(short) == [None, "a"]


def test_a_group_needs_no_copies_and_keeps_those_of_others_in_turn() -> None:
    found = protected("a", "bc", "d")
    assert kept_by(found)[1] is None
    assert {kept_by(found)[0], kept_by(found)[2]} == {"b", "c"}


def test_nothing_is_kept_by_one_device_or_by_groups_alone() -> None:
    assert kept_by(protected("a")) == [None]
    assert kept_by(protected("a", "a")) == [None, None]
    assert kept_by(protected("ab", "cd")) == [None, None]
    assert not protected("a").unprotected


def test_a_stage_of_the_same_device_is_no_place_for_a_copy() -> None:
    """A private job: the holder has both ends."""
    assert kept_by(protected("a", "b", "a")) == ["b", "a", "b"]


def test_the_neighbour_with_more_memory_keeps() -> None:
    assert kept_by(protected("a", "bc", b=500, c=600))[0] == "c"


def test_whichever_device_has_room_keeps_where_no_neighbour_has() -> None:
    assert kept_by(protected("a", "b", "c", "d", b=200, c=PLENTY))[0] == "c"


def test_without_room_a_stage_is_unprotected_and_the_others_are_not() -> None:
    found = protected("a", "b", a=200, b=400)
    assert kept_by(found) == ["b", None]
    assert found.unprotected == (UnbackedStage(1, "b"),)


def test_nobody_keeps_anything_where_one_has_no_room_for_its_own() -> None:
    """A version that lacks a stage is no version to go back to."""
    found = protected("a", "bc", "d", c=199)
    assert kept_by(found) == [None, None, None]
    assert found.unprotected == (UnbackedStage(0, "a", "c"), UnbackedStage(2, "d", "c"))


def test_where_checkpoints_are_written_room_for_one_more_of_ones_own_is_needed() -> None:
    stages, sizes = pipeline("a", "b"), [KeptBytes(100)] * 2
    spare = {"a": 500, "b": 499}
    assert kept_by(assign_backup_peers(stages, sizes, spare)) == ["b", "a"]
    found = assign_backup_peers(stages, sizes, spare, SLOTS_WITH_CHECKPOINTS)
    assert kept_by(found) == [None, "a"]
    assert found.unprotected == (UnbackedStage(0, "a"),)


@st.composite
def plans(draw: st.DrawFn) -> tuple[tuple[PlacedStage, ...], list[KeptBytes], dict[str, int]]:
    devices = list(draw(st.permutations("abcdef")))[: draw(st.integers(1, 6))]
    groups: list[list[str]] = [[devices[0]]]
    for device in devices[1:]:
        if draw(st.booleans()):
            groups.append([])
        groups[-1].append(device)
    stages = tuple(PlacedStage(p, p + 1, tuple(names)) for p, names in enumerate(groups))
    sizes = [KeptBytes(draw(st.integers(0, 50)), draw(st.integers(0, 50))) for _ in stages]
    spare = {d: draw(st.integers(0, 400)) for d in devices}
    return stages, sizes, spare


@given(plans())
def test_nobody_is_given_more_than_it_has_room_for(
    plan: tuple[tuple[PlacedStage, ...], list[KeptBytes], dict[str, int]],
) -> None:
    stages, sizes, spare = plan
    found = assign_backup_peers(stages, sizes, spare)
    kept = [stage.copies_to for stage in found.stages]
    assert [replace(stage, copies_to=None) for stage in found.stages] == list(stages)
    if any(kept):
        for device, room in spare.items():
            own = [n for n, s in zip(sizes, stages, strict=True) if device in s.devices]
            others = [
                n for n, backup_peer in zip(sizes, kept, strict=True) if backup_peer == device
            ]
            versions = sum(SLOTS * size.changing for size in (*own, *others))
            assert versions + sum(size.frozen for size in others) <= room
    for p, (stage, backup_peer) in enumerate(zip(stages, kept, strict=True)):
        alone = len(stage.devices) == 1 and len({d for s in stages for d in s.devices}) > 1
        told = p in {missing.stage for missing in found.unprotected}
        assert alone == ((backup_peer is not None) or told)
        assert backup_peer is None or backup_peer in backup_peers_of(stages, p)


def having(**entries: list[StateEntry]) -> dict[str, StateReport]:
    return {device: StateReport(device, entries=tuple(held)) for device, held in entries.items()}


def copy(first: int, end: int, kind: StateKind, version: Version = R) -> StateEntry:
    return StateEntry(first, end, version, kind)


def test_a_version_is_covered_where_every_unit_is_kept_twice() -> None:
    stages = (PlacedStage(0, 2, ("a",), "b"), PlacedStage(2, 4, ("b",), "a"))
    whole = having(
        a=[copy(0, 2, StateKind.KEPT), copy(2, 4, StateKind.REPLICA)],
        b=[copy(2, 4, StateKind.KEPT), copy(0, 2, StateKind.REPLICA)],
    )
    assert is_covered(R, stages, whole)
    assert not is_covered(Version(9, 3), stages, whole)
    assert not is_covered(R, stages, {"a": whole["a"]})
    for kind in (StateKind.LIVE, StateKind.FETCHED):  # gone or another version soon
        moving = having(a=[copy(0, 4, kind)], b=[copy(0, 4, StateKind.KEPT)])
        assert not is_covered(R, stages, moving)


def test_a_stage_without_a_keeper_need_only_be_there() -> None:
    stages = (PlacedStage(0, 1, ("a",), "b"), PlacedStage(1, 2, ("b",)))
    held = having(
        a=[copy(0, 1, StateKind.KEPT)],
        b=[copy(0, 1, StateKind.REPLICA), copy(1, 2, StateKind.KEPT)],
    )
    assert is_covered(R, stages, held)
    assert not is_covered(R, stages, {"a": held["a"], "b": StateReport("b")})
