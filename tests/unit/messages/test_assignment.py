"""Assignments that no device may follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.errors import OptionError, ProtocolError
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.messages.assignment import Assignment, StageAssignment
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.net.forms import write_form
from p2ptrain.net.read_form import read_form
from p2ptrain.plan.types.allocation import Allocation, TileShape
from p2ptrain.plan.types.gradient_sums import MAX_BYTES
from p2ptrain.plan.types.weight_versions import Weights
from p2ptrain.recovery.version import Version

AT = Version(7, 2)


def assignment(place: StageAssignment) -> Assignment:
    return Assignment(GenerationKey("job", 1), "a", "digest", (place,), 8, 4, SGD(), 0, False, AT)


def shared(*shares: int, allocation: Allocation = Allocation.SAMPLES) -> StageAssignment:
    devices = tuple("abc"[: len(shares)])
    return StageAssignment(0, 3, warmup=1, devices=devices, shares=shares, allocation=allocation)


def test_a_good_one_survives() -> None:
    good = assignment(shared(3, 1))
    assert Assignment.from_bytes(good.to_bytes()) == good
    told = replace(good, stable=Version(4, 1), keeps=True)
    assert Assignment.from_bytes(told.to_bytes()) == told


def test_no_update_is_made_ahead_of_what_it_waits_for() -> None:
    good = assignment(replace(shared(3, 1), goes_ahead=True))
    assert Assignment.from_bytes(good.to_bytes()) == good
    how = AsyncOptions(Weights.STASHED)
    tiles = followed(replace(tiled(1, 2, 1), goes_ahead=True))
    for bad in (replace(good, clip=True), replace(good, asynchrony=how), tiles):
        with pytest.raises(ProtocolError, match="ahead of what it waits for"):
            Assignment.from_bytes(bad.to_bytes())


def test_sums_turn_inside_their_stage_where_updates_go_ahead() -> None:
    good = assignment(replace(shared(3, 1), goes_ahead=True, turn=2))
    assert Assignment.from_bytes(good.to_bytes()) == good
    places = [replace(good.stages[0], turn=turn) for turn in (0, 4)]
    for place in (*places, replace(good.stages[0], goes_ahead=False)):
        with pytest.raises(ProtocolError, match="sums turn at one of their stage's units"):
            Assignment.from_bytes(assignment(place).to_bytes())


def test_buckets_of_sums_have_a_size_that_memory_was_planned_for() -> None:
    good = assignment(replace(shared(3, 1), bucket_bytes=MAX_BYTES))
    assert Assignment.from_bytes(good.to_bytes()) == good
    for size in (0, -1, MAX_BYTES + 1):
        bad = assignment(replace(shared(3, 1), bucket_bytes=size))
        with pytest.raises(ProtocolError, match=r"bucket_bytes: expected at (least 1|most)"):
            Assignment.from_bytes(bad.to_bytes())


def test_who_waits_for_sums_has_no_other_stage_that_may_be_waited_for() -> None:
    first = replace(shared(3, 1), goes_ahead=True, turn=2)
    last = replace(shared(4), first=3, end=5)
    bad = replace(assignment(first), stages=(first, last))
    with pytest.raises(ProtocolError, match="waits for sums has one stage"):
        Assignment.from_bytes(bad.to_bytes())


@pytest.mark.parametrize("shares", [(0,), (4, 0), (0, 4), (5, -1)])
def test_a_device_without_a_share_is_refused(shares: tuple[int, ...]) -> None:
    for allocation in Allocation:
        bad = assignment(shared(*shares, allocation=allocation))
        with pytest.raises(ProtocolError, match=r"shares\[\d\]: expected at least 1"):
            Assignment.from_bytes(bad.to_bytes())


def test_shares_add_up_to_what_they_count() -> None:
    with pytest.raises(ProtocolError, match=r"\[2, 1\] do not add up to 4"):
        Assignment.from_bytes(assignment(shared(2, 1)).to_bytes())
    dealt = shared(2, 1, allocation=Allocation.MICRO_BATCHES)
    with pytest.raises(ProtocolError, match=r"\[2, 1\] do not add up to 2"):
        Assignment.from_bytes(assignment(dealt).to_bytes())


def test_a_split_backward_holds_at_least_the_warm_up() -> None:
    bad = assignment(replace(shared(4), warmup=2, held=1))
    with pytest.raises(ProtocolError, match="at least its stage's warm-up"):
        Assignment.from_bytes(bad.to_bytes())


TILES = TileShape((0.25, 0.75), (0.5, 0.5), (0, 1, 3))


def tiled(*shares: int, first: int = 0, shape: TileShape | None = TILES) -> StageAssignment:
    place = shared(*shares, allocation=Allocation.TILES)
    return replace(place, first=first, end=first + 3, tiling=shape)


def followed(*places: StageAssignment) -> Assignment:
    """With a stage of one device behind."""
    behind = StageAssignment(places[-1].end, places[-1].end + 2, 1, ("d",), (1,))
    return replace(assignment(places[0]), stages=(*places, behind))


def test_a_tiled_stage_survives() -> None:
    good = followed(tiled(1, 2, 1))
    assert Assignment.from_bytes(good.to_bytes()) == good


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (followed(tiled(1, 2)), "3 tiles of 3 units, but the grid has 4 of 3"),
        (followed(replace(tiled(1, 2, 1), end=4)), "4 tiles of 4 units, but the grid has 4 of 3"),
        (assignment(tiled(1, 2, 1)), "only a first stage is tiled, and others follow"),
        (followed(shared(2, 2), tiled(1, 2, 1, first=3)), "only a first stage is tiled"),
        (followed(replace(tiled(1, 3), held=2)), "of a tiled stage is not split"),
        (followed(tiled(1, 3, shape=None)), "a tiled stage says how its maps are cut"),
        (followed(replace(shared(1, 3), tiling=TILES)), "and no other does"),
        (followed(tiled(1, 3, shape=TileShape((1,), (1.0,), (0, 3)))), "4 tiles of 3 units, but"),
    ],
)
def test_a_tiled_stage_fits_its_grid(bad: Assignment, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        Assignment.from_bytes(bad.to_bytes())


def test_tiles_are_cut_by_numbers_above_zero() -> None:
    for wrong in ({"rows": [0.0]}, {"columns": []}, {"borders": [0, 3, 2]}, {"aligned": 1}):
        fields = {**write_form(TILES), **wrong}
        with pytest.raises(OptionError):
            read_form(TileShape, fields, "tiles", OptionError)
