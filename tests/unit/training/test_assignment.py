"""Assignments that no device may follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.errors import ProtocolError
from p2ptrain.plan.allocation import Allocation
from p2ptrain.training.assignment import Assignment, StagePlace
from p2ptrain.training.protocol import EpochKey
from p2ptrain.training.recovery.version import Version

AT = Version(7, 2)


def assignment(place: StagePlace) -> Assignment:
    return Assignment(EpochKey("job", 1), 1, "a", "digest", (place,), 8, 4, {}, 0, False, AT)


def shared(*shares: int, allocation: Allocation = Allocation.SAMPLES) -> StagePlace:
    devices = tuple("abc"[: len(shares)])
    return StagePlace(0, 3, warmup=1, devices=devices, shares=shares, allocation=allocation)


def test_a_good_one_survives() -> None:
    good = assignment(shared(3, 1))
    assert Assignment.from_bytes(good.to_bytes()) == good
    told = replace(good, stable=Version(4, 1), keeps=True)
    assert Assignment.from_bytes(told.to_bytes()) == told


@pytest.mark.parametrize("shares", [(0,), (4, 0), (0, 4), (5, -1)])
def test_a_device_without_a_share_is_refused(shares: tuple[int, ...]) -> None:
    for allocation in Allocation:
        bad = assignment(shared(*shares, allocation=allocation))
        with pytest.raises(ProtocolError, match="share of a stage is at least 1"):
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
