from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from p2ptrain.errors import OptionError
from p2ptrain.net.forms import write_form
from p2ptrain.net.read_form import read_form
from p2ptrain.plan.types.unit_times import Times, TimeTable, UnitTimes


@dataclass(frozen=True)
class Timed:
    times: Times


def read(value: object) -> TimeTable:
    return read_form(Timed, {"times": value}, "profile", OptionError).times


def written(table: TimeTable) -> Any:
    return write_form(Timed(table))["times"]


TABLE = TimeTable(
    (4, 8, 16),
    (UnitTimes((1.0,), (2.0,)), UnitTimes((1.5,), (4.0,)), UnitTimes((3.5,), (8.0,))),
)


@pytest.mark.parametrize(
    ("samples", "forward", "backward"),
    [
        (4, 1.0, 2.0),
        (8, 1.5, 4.0),
        (6, 1.25, 3.0),  # half-way between two measured sizes
        (14, 3.0, 7.0),
        (32, 7.0, 16.0),  # above: the largest's cost per sample
        (3, 0.75, 1.5),  # below: proportional ...
        (2, 0.5, 1.0),
        (1, 0.5, 1.0),  # ... but at least half of the smallest's time
    ],
)
def test_times_between_above_and_below_the_measured_sizes(
    samples: int, forward: float, backward: float
) -> None:
    assert TABLE.at(samples) == UnitTimes((forward,), (backward,))


def test_slowdown_scales_every_time() -> None:
    assert TABLE.times_slowdown(2.0).at(8) == UnitTimes((3.0,), (8.0,))


def test_json_round_trip() -> None:
    assert read(written(TABLE)) == TABLE
    assert "weight" not in written(TABLE)["4"]


def test_the_weights_part_of_a_backward_is_scaled_and_interpolated_with_it() -> None:
    table = TimeTable(
        (4, 8), (UnitTimes((1.0,), (2.0,), (0.5,)), UnitTimes((1.5,), (4.0,), (2.0,)))
    )
    assert read(written(table)) == table
    assert table.at(6).weight == (1.25,)
    assert table.at(16).weight == (4.0,)
    assert table.times_slowdown(3.0).at(4).weight == (1.5,)
    assert TimeTable((4,), table.times[:1]).extended_like(table).at(8).weight == (1.0,)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "times: expected times by batch size"),
        ([], "times: expected an object, found []"),
        ({"0": {"forward": [1], "backward": [1]}}, "at least 1, found '0'"),
        ({"1.5": {"forward": [1], "backward": [1]}}, "whole number, found '1.5'"),
        ({"-1": {"forward": [1], "backward": [1]}}, "whole number"),
        (
            {"1": {"forward": [1], "backward": [1]}, "01": {"forward": [1], "backward": [1]}},
            "batch size 1 is given twice",
        ),
        ({"1": {"forward": [1]}}, 'times["1"]: the field "backward" is missing'),
        ({"1": {"forward": [1], "backward": []}}, "1 forward times but 0 backward"),
        ({"1": {"forward": [1], "backward": [1, 2]}}, "1 forward times but 2 backward"),
        (
            {"1": {"forward": [-1], "backward": [1]}},
            'times["1"].forward[0]: expected at least 0',
        ),
        ({"1": {"forward": [float("nan")], "backward": [1]}}, "forward[0]: expected a finite"),
        (
            {"1": {"forward": [10**400], "backward": [1]}},
            "forward[0]: expected a number, found a",
        ),
        ({"1": {"forward": ["1"], "backward": [1]}}, "forward[0]: expected a number, found '1'"),
        ({"1": {"forward": [True], "backward": [1]}}, "forward[0]: expected a number, found True"),
        (
            {"1": {"forward": [1], "backward": [1]}, "2": {"forward": [1, 1], "backward": [1, 1]}},
            "differ in their number of units",
        ),
        (
            {"1": {"forward": [1], "backward": [1], "weight": [1, 1]}},
            "1 backward times but 2 weight",
        ),
        (
            {"1": {"forward": [1], "backward": [1], "weight": [1.5]}},
            'batch size "1": weight[0]: 1.5 is more than the whole backward, 1',
        ),
        ({"1": {"forward": [1], "backward": [1], "weight": [-1]}}, "weight[0]: expected at least"),
        (
            {
                "1": {"forward": [1], "backward": [1], "weight": [1]},
                "2": {"forward": [1], "backward": [1]},
            },
            'some batch sizes have times of "weight" and some have not',
        ),
    ],
)
def test_wrong_times_are_refused_by_name(value: object, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        read(value)
    assert message in str(caught.value)


def test_a_slow_device_grows_with_the_batch_as_the_reference_does() -> None:
    """Eight samples cost the reference twice, not four times, what two cost."""
    reference = TimeTable(
        (2, 8), (UnitTimes((1.0, 1.0), (2.0, 2.0)), UnitTimes((2.0, 2.0), (3.0, 3.0)))
    )
    slow = TimeTable((2,), (UnitTimes((10.0, 30.0), (20.0, 60.0)),))
    extended = slow.extended_like(reference)
    assert extended.sizes == (2, 8)
    assert extended.at(8) == UnitTimes((20.0, 60.0), (30.0, 90.0))
    assert extended.at(2) == slow.at(2)
    assert reference.extended_like(slow) == reference


def test_units_whose_part_changes_with_the_size_grow_as_the_reference_s() -> None:
    """The second unit takes no longer for eight samples; all together take twice as long."""
    small, large = UnitTimes((1.0, 1.0), (2.0, 2.0), (1.0, 0.0)), UnitTimes((3.0, 1.0), (7.0, 1.0))
    reference = TimeTable((2, 8), (small, large))
    slow = TimeTable((2,), (UnitTimes((10.0, 30.0), (20.0, 20.0), (5.0, 0.0)),))
    grown = slow.extended_like(reference).at(8)
    assert grown.forward == pytest.approx((40.0, 40.0))
    assert grown.backward == pytest.approx((70.0, 10.0))
    assert grown.weight == pytest.approx((17.5, 0.0))


def test_a_completed_table_goes_on_in_a_line_from_one_sample_to_the_whole_batch() -> None:
    """A batch of y samples takes 1 + y and 2 + 2y seconds."""
    table = TimeTable(
        (4, 16), (UnitTimes((5.0,), (10.0,), (5.0,)), UnitTimes((17.0,), (34.0,), (8.5,)))
    )
    completed = table.completed(20)
    assert completed.sizes == (1, 4, 16, 20)
    assert completed.at(20) == UnitTimes((21.0,), (42.0,), (10.5,))
    assert completed.at(1) == UnitTimes((2.0,), (4.0,), (2.0,))
    assert completed.at(10) == table.at(10)


def test_a_sample_beyond_the_largest_size_is_not_much_cheaper_than_one_there() -> None:
    flat = TimeTable((4, 16), (UnitTimes((5.0,), (5.0,)), UnitTimes((5.0,), (4.0,))))
    larger = flat.completed(32).at(32)
    assert larger.forward == pytest.approx((9.25,))
    assert larger.backward == pytest.approx((7.4,))
    assert flat.completed(16).at(1) == UnitTimes((5.0,), (5.0,))


def test_from_a_large_size_on_a_sample_costs_more_than_one_there() -> None:
    table = TimeTable((16, 64), (UnitTimes((9.0,), (18.0,)), UnitTimes((33.0,), (66.0,))))
    assert table.completed(256).at(256).forward == pytest.approx((33.0 * (1 + 1.1 * 3),))
    assert table.completed(256).at(256).backward == pytest.approx((66.0 * (1 + 1.1 * 3),))
    smaller = TimeTable((16, 32), (UnitTimes((9.0,), (18.0,)), UnitTimes((17.0,), (34.0,))))
    assert smaller.completed(256).at(256).forward[0] < 8 * 17.0


def test_a_table_that_grows_faster_than_its_size_goes_on_in_proportion() -> None:
    steep = TimeTable((4, 16), (UnitTimes((1.0,), (1.0,)), UnitTimes((8.0,), (8.0,))))
    assert steep.completed(32).at(32) == UnitTimes((16.0,), (16.0,))
    assert steep.completed(32).at(1) == UnitTimes((0.25,), (0.25,))


def test_a_single_size_is_taken_to_cost_something_whatever_its_samples() -> None:
    single = TimeTable((4,), (UnitTimes((10.0,), (20.0,), (5.0,)),))
    completed = single.completed(64)
    assert completed.sizes == (1, 4, 64)
    assert completed.at(4) == single.at(4)
    assert completed.at(1) == UnitTimes((5.5,), (11.0,), (2.75,))
    assert completed.at(64) == UnitTimes((100.0,), (200.0,), (50.0,))
    assert single.completed(2).sizes == (1, 4)


def test_of_a_single_size_little_is_anybodys_where_weights_are_few_for_what_is_computed() -> None:
    single = TimeTable((4,), (UnitTimes((10.0,), (20.0,)),))
    bert, vit, yolo = (single.completed(8, by_flop).at(8) for by_flop in (1.0, 0.025, 0.0))
    assert bert.forward == pytest.approx((16.0,))
    assert vit.forward == pytest.approx((18.0,)), "a fifth is of weights, at a byte for 40 flops"
    assert yolo.forward == pytest.approx((20.0,))


def test_below_the_size_from_which_units_cost_less_they_cost_what_smaller_ones_do() -> None:
    small = UnitTimes((4.0, 4.0), (8.0, 8.0), (2.0, 2.0))
    large = UnitTimes((8.0, 16.0), (16.0, 32.0), (4.0, 8.0))
    table = TimeTable((4, 16), (small, large)).before_gain(16, {0})
    assert table.sizes == (4, 15, 16)
    assert (table.at(4), table.at(16)) == (small, large)
    of_a_line = 4.0 + 12.0 * 11 / 12
    below = table.at(15)
    assert below.forward[1] == pytest.approx(of_a_line)
    assert below.backward[1] == pytest.approx(2 * of_a_line)
    assert 8.0 < below.forward[0] <= 15.0
    assert below.weight[0] == pytest.approx(below.forward[0] / 2)
    assert table.at(10).forward[0] > TimeTable((4, 16), (small, large)).at(10).forward[0]


@pytest.mark.parametrize("sizes", [(16, 64), (4, 8), (4, 15, 16)])
def test_a_table_that_says_nothing_of_both_sides_stays_as_it_is(sizes: tuple[int, ...]) -> None:
    times = tuple(UnitTimes((float(size),), (2.0 * size,)) for size in sizes)
    table = TimeTable(sizes, times)
    assert table.before_gain(16, {0}) == table
