"""A forward that makes the update of the round before, unit by unit, as sums come."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.allreduce_buckets import ArrivedSums, SumsAbandoned
from p2ptrain.runtime.live_stage import LiveStage
from p2ptrain.runtime.optimizer_step import OverlappedUpdate
from p2ptrain.runtime.reduced_tensors import ReducedTensors
from tests.unit.runtime.test_live_stage import (
    GENERATION,
    MICRO_BATCH,
    MICRO_BATCHES,
    assert_equal,
    compute_round,
    copies,
    data,
    make_live,
    make_order,
)

BUCKET_BYTES = 64
UNITS = 5


@pytest.fixture(scope="module")
def captured() -> Captured:
    """Statistics, and a parameter that two units use."""
    torch.manual_seed(3)
    x, y = data()
    tied = nn.Linear(6, 6)
    model = nn.Sequential(nn.BatchNorm1d(6), tied, nn.Tanh(), tied, nn.Linear(6, 3))
    return capture(model, cross_entropy, (x[:MICRO_BATCH], y[:MICRO_BATCH]), evaluation=False)


class Trailing:
    """A stage whose backwards are over; its sums are what it has itself."""

    def __init__(self, captured: Captured, turn: int | None = 3) -> None:
        self.live = make_live(captured, shared=True)

        def size(*_: int) -> int:
            return BUCKET_BYTES

        self.summed = ReducedTensors(self.live.stage, size, turn=turn, turned_bytes=size)
        self.arrived = ArrivedSums()
        for step in range(2):
            compute_round(self.live)
            order = make_order(step)
            if step == 0:  # the optimizer's state is there
                self.live.get_ready(order)
                self.live.apply(None)
        self.order = order
        self.live.begin_update(order)

    def forward(self) -> list[torch.Tensor]:
        """The next round's first."""
        x, y = data()
        update = OverlappedUpdate(self.live, self.summed, self.arrived, MICRO_BATCHES)
        part = slice(MICRO_BATCH)
        return self.live.stage.forward(0, [x[part]], [y[part]], passing=update)


def _plain(captured: Captured) -> tuple[LiveStage, list[torch.Tensor]]:
    """The same, sums first."""
    live = make_live(captured, shared=True)
    for step in range(2):
        compute_round(live)
        live.get_ready(make_order(step))
        live.apply(None)
    x, y = data()
    live.save(MICRO_BATCHES)
    return live, live.stage.forward(0, [x[:MICRO_BATCH]], [y[:MICRO_BATCH]])


@pytest.mark.parametrize("turn", [None, 1, 3, UNITS])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_bits_in_whatever_order_sums_come(
    captured: Captured, turn: int | None, seed: int
) -> None:
    plain, wanted = _plain(captured)
    trailing = Trailing(captured, turn)
    before = copies(trailing.live)
    buckets = [bucket.index for bucket in trailing.summed.buckets]
    random.Random(seed).shuffle(buckets)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(trailing.forward)
        for bucket in buckets:
            assert not running.done()
            assert_equal(trailing.live.named(), before)
            trailing.arrived.add(bucket)
        outputs = running.result(5)
    assert torch.equal(outputs[0], wanted[0])
    assert_equal(trailing.live.named(), before)
    trailing.live.get_ready(trailing.order)
    trailing.live.apply(None)
    assert trailing.live.version == Version(2, GENERATION)
    assert_equal(trailing.live.named(), plain.named())


def test_a_unit_waits_for_its_own_sums_only(captured: Captured) -> None:
    trailing = Trailing(captured, turn=UNITS)
    update = OverlappedUpdate(trailing.live, trailing.summed, trailing.arrived, MICRO_BATCHES)
    needs, units = trailing.summed.buckets_of_names, trailing.summed.units
    there = set[int]()
    with ThreadPoolExecutor(1) as thread:
        for unit in range(UNITS):
            own = set[int]().union(*(needs[name] for name, first in units.items() if first == unit))
            passing = thread.submit(update.unit, unit)
            for bucket in sorted(own - there):
                assert not passing.done()
                trailing.arrived.add(bucket)
            passing.result(5)
            there |= own
    assert there == frozenset[int]().union(*needs.values())


@pytest.mark.parametrize("there", [0, 1, 3])
def test_given_up_on_the_way_it_is_the_version_before(captured: Captured, there: int) -> None:
    """Done again from there it comes to the same bits."""
    plain, _ = _plain(captured)
    trailing = Trailing(captured)
    before = copies(trailing.live)
    for bucket in trailing.summed.buckets[::-1][:there]:
        trailing.arrived.add(bucket.index)
    trailing.arrived.give_up()
    with pytest.raises(SumsAbandoned):
        trailing.forward()
    assert (trailing.live.version, trailing.live.ready) == (Version(1, GENERATION), None)
    assert not trailing.live.torn
    assert_equal(trailing.live.named(), before)
    again = make_live(captured, copies(trailing.live), step=1, shared=True)
    compute_round(again)
    again.get_ready(make_order(1))
    again.apply(None)
    assert_equal(again.named(), plain.named())


@pytest.mark.parametrize("there", [0, 1, 3])
def test_given_up_when_it_counts_already_it_is_made_to_its_end(
    captured: Captured, there: int
) -> None:
    """All sums came, and the generation ended before the forward had come past them."""
    plain, _ = _plain(captured)
    trailing = Trailing(captured)
    for bucket in trailing.summed.buckets[::-1][:there]:
        trailing.arrived.add(bucket.index)
    trailing.arrived.give_up()
    with pytest.raises(SumsAbandoned):
        trailing.forward()
    trailing.live.get_ready(trailing.order)
    trailing.live.apply(None)
    assert_equal(trailing.live.named(), plain.named())


def test_an_update_that_fails_on_the_way_has_torn_the_stage(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    trailing = Trailing(captured)

    def fails(*_: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(trailing.live.optimizer, "step", fails)
    for bucket in trailing.summed.buckets:
        trailing.arrived.add(bucket.index)
    with pytest.raises(RuntimeError, match="allocate"):
        trailing.forward()
    assert trailing.live.torn
