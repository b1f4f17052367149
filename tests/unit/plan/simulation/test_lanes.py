from __future__ import annotations

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup, alone
from p2ptrain.plan.simulation.engine import FEED, Lane
from p2ptrain.plan.simulation.lanes import build_engine
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.cluster import ClusterLink
from tests.support import planning_examples

TWO_UNITS = planning_examples.profile(
    [(1.0, 2.0)] * 2, output_bytes=10, input_bytes=3, target_bytes=2
)
TURNS = Allocation.MICRO_BATCHES


def lanes(split: BatchSplit, *groups: StageGroup, warmup: tuple[int, ...] = (2, 1)) -> list[Lane]:
    """Stages of a unit each; device 0 is the holder, links carry a byte a second."""
    cost = CostModel(
        TWO_UNITS, planning_examples.cluster("a", "b", "c", "d", link=ClusterLink(1.0, 0.5))
    )
    draft = Draft(split, tuple(range(len(groups) + 1)), groups, warmup[: len(groups)])
    return list(build_engine(cost, draft).lanes)


def sent(lane: Lane, task: int) -> list[tuple[int, float]]:
    """(receiver, seconds) of what goes out after a task."""
    return [(route.receiver, route.seconds) for route in lane.routes[task]]


def test_only_common_samples_travel() -> None:
    # The module's picture: 4 : 2 to 3 : 3, ten bytes a sample.
    split = BatchSplit(12, 6)
    a, b, c, d = lanes(split, StageGroup((0, 1), (4, 2)), StageGroup((2, 3), (3, 3)))
    assert sent(a, 0) == [(2, 30.0), (3, 10.0)]
    assert sent(b, 0) == [(3, 20.0)]
    assert sent(c, 1) == [(0, 30.0)]
    assert sent(d, 1) == [(0, 10.0), (1, 20.0)]
    assert [lane.missing[:2] for lane in (a, b, c, d)] == [[0, 2], [1, 1], [2, 0], [3, 0]]


def test_a_smaller_last_micro_batch_leaves_some_without_a_part() -> None:
    # Nine samples: the last micro-batch has three, all of them a's and c's.
    split = BatchSplit(9, 6)
    a, b, c, d = lanes(split, StageGroup((0, 1), (4, 2)), StageGroup((2, 3), (3, 3)))
    assert sent(a, 2) == [(2, 30.0)]
    assert [lane.tasks for lane in (a, b)] == [(0, 2, 1, 3), (0, 1)]
    assert [lane.tasks for lane in (c, d)] == [(0, 1, 2, 3), (0, 1)]
    assert a.seconds == [4.0, 8.0, 3.0, 6.0]
    assert c.missing == [2, 0, 2, 0]


def test_whole_micro_batches_go_to_those_whose_turn_it_is() -> None:
    split = BatchSplit(8, 2)
    a, b, c, d = lanes(split, StageGroup((0, 1), (3, 1), TURNS), StageGroup((2, 3), (2, 2), TURNS))
    # a a b a to c d c d.
    assert [lane.tasks for lane in (a, b)] == [(0, 2, 1, 3, 6, 7), (4, 5)]
    outputs = [sent(lane, 2 * m) for m, lane in enumerate((a, a, b, a))]
    assert outputs == [[(2, 20.0)], [(3, 20.0)], [(2, 20.0)], [(3, 20.0)]]
    gradients = [sent(lane, 2 * m + 1) for m, lane in enumerate((c, d, c, d))]
    assert gradients == [[(0, 20.0)], [(0, 20.0)], [(1, 20.0)], [(0, 20.0)]]
    assert c.missing[0] == 2  # and its target


def test_the_holder_feeds_all_but_itself() -> None:
    split = BatchSplit(5, 2)
    a, b, c = lanes(split, StageGroup((0, 1), (1, 1)), alone(split, 2))
    assert a.feed is None
    assert b.feed is not None
    assert c.feed is not None
    assert {(r.sender, r.uplink, r.receiver, r.downlink) for r in b.feed} == {(FEED, 0, 1, 1)}
    assert [b.feed[0].seconds, c.feed[0].seconds, c.feed[4].seconds] == [3.0, 4.0, 2.0]


def test_input_and_target_for_one_device_are_one_transfer() -> None:
    split = BatchSplit(4, 2)
    (only,) = lanes(split, alone(split, 1), warmup=(1,))
    assert only.feed is not None
    assert [route.seconds for route in only.feed] == [10.0] * 4
    assert only.missing == [1, 0, 1, 0]
