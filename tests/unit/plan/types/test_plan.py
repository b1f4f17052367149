from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from p2ptrain.errors import OptionError, PlanError
from p2ptrain.plan.cost.check_plan import check_memory, check_plan
from p2ptrain.plan.types.allocation import Allocation
from p2ptrain.plan.types.cluster import ClusterLink
from p2ptrain.plan.types.gradient_sums import MAX_BYTES, USUAL
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.planning_file import LARGEST_WHOLE
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples

CONTENT: dict[str, Any] = {
    "format": "p2ptrain.plan/1",
    "planner": "auto",
    "found_by": "hybrid",
    "micro_batch": 16,
    "micro_batches": 32,
    "stages": [
        {
            "units": [0, 12],
            "devices": [{"name": "laptop", "share": 10}, {"name": "pi", "share": 6}],
            "warmup": 3,
        },
        {"units": [12, 20], "devices": [{"name": "nas", "share": 16}], "warmup": 1},
    ],
    "predicted": {"round_seconds": 1.9, "samples_per_s": 269.0, "peak_bytes": {"laptop": 41}},
    "left_out": [{"name": "old-phone", "reason": "too slow"}],
}

Change = Callable[[dict[str, Any]], object]


def test_a_plan_with_a_group_reads_and_writes_back() -> None:
    plan = Plan.from_json(CONTENT)
    assert plan.split.batch_size == 512
    assert plan.stages[0].allocation is Allocation.SAMPLES
    assert plan.to_json() == CONTENT


def test_a_plan_of_the_slowest_link_allowed_reads_back() -> None:
    """Each of its figures may be in a file, and a round is more than the largest of them."""
    slowest = ClusterLink(1.0, float(LARGEST_WHOLE))
    request = PlanRequest(8, 2, "pp")
    plan = make_plan(
        planning_examples.profile([(1.0, 1.0)] * 2),
        planning_examples.cluster("a", "b", link=slowest),
        request,
    )
    assert plan.predicted.round_seconds > LARGEST_WHOLE
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("seconds", [math.inf, math.nan, -1.0, 10**400])
def test_a_prediction_is_a_number_all_the_same(seconds: float) -> None:
    content = copy.deepcopy(CONTENT)
    content["predicted"]["round_seconds"] = seconds
    with pytest.raises(OptionError, match=r"plan\.predicted\.round_seconds: expected a"):
        Plan.from_json(content)


def test_predictions_whose_product_is_no_number_imply_no_batch_size() -> None:
    content = copy.deepcopy(CONTENT)
    content["predicted"] |= {"round_seconds": 1e300, "samples_per_s": 1e300}
    assert Plan.from_json(content).split.batch_size == 512


def test_whole_micro_batches_may_be_dealt() -> None:
    content = copy.deepcopy(CONTENT)
    content["stages"][0]["allocation"] = "micro_batches"
    content["stages"][0]["devices"][0]["share"] = 26
    plan = Plan.from_json(content)
    assert plan.stages[0].allocation is Allocation.MICRO_BATCHES
    assert plan.to_json() == content


def test_where_sums_turn_is_part_of_it() -> None:
    content = copy.deepcopy(CONTENT)
    content["stages"][0] |= {"ahead": True, "turn": 7}
    plan = Plan.from_json(content)
    assert [stage.turn for stage in plan.stages] == [7, None]
    assert plan.to_json() == content
    for turn in (0, 13):
        content["stages"][0]["turn"] = turn
        with pytest.raises(OptionError, match="turn"):
            Plan.from_json(content)


def test_what_is_summed_together_is_part_of_it_where_it_is_not_the_usual() -> None:
    content = copy.deepcopy(CONTENT)
    content["stages"][0]["bucket_bytes"] = MAX_BYTES
    plan = Plan.from_json(content)
    assert [stage.bucket_bytes for stage in plan.stages] == [MAX_BYTES, USUAL.least_bytes]
    assert plan.to_json() == content
    for size in (0, MAX_BYTES + 1, 2.5):
        content["stages"][0]["bucket_bytes"] = size
        with pytest.raises(OptionError, match=r"plan\.stages\[0\]\.bucket_bytes"):
            Plan.from_json(content)


def test_the_batch_size_follows_from_what_is_predicted() -> None:
    content = copy.deepcopy(CONTENT)
    content["predicted"] |= {"round_seconds": 2.0, "samples_per_s": 250.0}
    assert Plan.from_json(content).split.batch_size == 500
    content["predicted"] |= {"round_seconds": 2.0, "samples_per_s": 100.0}
    assert Plan.from_json(content).split.batch_size == 512
    assert Plan.from_json(content, batch_size=499).split.batch_size == 499
    with pytest.raises(OptionError, match="micro_batches: 32, but 100 samples are 7"):
        Plan.from_json(content, batch_size=100)


def stage(p: int, **fields: object) -> Change:
    return lambda content: content["stages"][p].update(fields)


def twice(name: str) -> Change:
    return stage(1, devices=[{"name": name, "share": 16}])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(stages=[]), "a plan needs at least one stage"),
        (stage(0, units=[1, 12]), "stages[0].units: [1, 12] must begin at 0"),
        (stage(1, units=[13, 20]), "stages[1].units: [13, 20] must begin at 12"),
        (stage(1, units=[12, 12]), "hold at least one unit"),
        (stage(1, units=[12]), "stages[1].units: expected 2 items, found 1"),
        (stage(1, warmup=4), "stages[1].warmup: 4 must lie between 1 and 3"),
        (stage(0, warmup=33), "stages[0].warmup: 33 must lie between 1 and 32"),
        (stage(0, warmup=0), "stages[0].warmup: expected at least 1"),
        (stage(1, devices=[{"name": "nas", "share": 15}]), "shares sum to 15, not to micro_batch"),
        (stage(1, devices=[{"name": "nas", "share": 0}]), "share: expected at least 1"),
        (stage(1, devices=[]), "a stage needs at least one device"),
        (stage(1, allocation="micro_batches"), "sum to 16, not to micro_batches = 32"),
        (
            stage(1, allocation="bytes"),
            "allocation: expected one of samples, micro_batches",
        ),
        (twice("pi"), '"pi" stands in stage 0 already'),
        (twice("old-phone"), 'left_out: "old-phone" stands in stage 1'),
        (lambda c: c["left_out"].append(c["left_out"][0]), 'left_out: "old-phone" is listed twice'),
        (lambda c: c.pop("left_out"), 'the field "left_out" is missing'),
        (lambda c: c.pop("predicted"), 'the field "predicted" is missing'),
        (lambda c: c.update(microbatch=1), 'unknown field "microbatch"'),
    ],
)
def test_wrong_plans_are_refused_by_name(change: Change, message: str) -> None:
    content = copy.deepcopy(CONTENT)
    change(content)
    with pytest.raises(OptionError) as caught:
        Plan.from_json(content)
    assert message in str(caught.value)


PROFILE = planning_examples.profile([(1, 1)] * 3)
SPLIT = planning_examples.BatchSplit(4, 2)


def test_a_plan_must_cover_the_units_and_the_devices() -> None:
    cluster = planning_examples.cluster("a", "b")
    whole = planning_examples.straight_plan(SPLIT, ("a", (0, 2), 2), ("b", (2, 3), 1))
    check_plan(whole, PROFILE, cluster)
    with pytest.raises(OptionError, match="end at layer 3, of 1 layers"):
        check_plan(whole, planning_examples.profile([(1, 1)]), cluster)
    with pytest.raises(OptionError, match='"b" is not in the cluster'):
        check_plan(whole, PROFILE, planning_examples.cluster("a"))
    with pytest.raises(OptionError, match="c is in no stage and not left out"):
        check_plan(whole, PROFILE, planning_examples.cluster("a", "b", "c"))
    with pytest.raises(OptionError, match="with --private"):
        check_plan(whole, PROFILE, cluster, private=True)


def test_only_the_holder_may_have_both_ends() -> None:
    plan = planning_examples.straight_plan(
        SPLIT, ("a", (0, 1), 2), ("b", (1, 2), 2), ("a", (2, 3), 1)
    )
    check_plan(plan, PROFILE, planning_examples.cluster("a", "b"), private=True)
    with pytest.raises(OptionError, match='but "b" is the holder'):
        check_plan(plan, PROFILE, planning_examples.cluster("b", "a"))


def test_memory_is_checked_by_device() -> None:
    cluster = planning_examples.cluster("a", memory_bytes=100)
    check_memory({"a": 100}, cluster)
    with pytest.raises(
        PlanError, match=r"a would need 103 bytes and has 100 bytes: 3 bytes missing"
    ):
        check_memory({"a": 103}, cluster)


def tiled_stage(**changed: object) -> Change:
    """The first stage as tiles of a 1 x 3 grid on its devices."""

    def change(content: dict[str, Any]) -> None:
        first = content["stages"][0]
        shares = len(first["devices"])
        for device in first["devices"]:
            device["share"] = 1
        end = first["units"][1]
        given = {"allocation": "tiles", "grid": [1, shares], "groups": [[0, 1], [1, end]]}
        first.update({**given, **changed})

    return change


def test_a_tiled_stage_reads_and_writes_back() -> None:
    content = copy.deepcopy(CONTENT)
    tiled_stage(columns=[0.25, 0.75])(content)
    tiling = Plan.from_json(content).stages[0].tiling
    assert tiling is not None
    assert (tiling.grid, tiling.rows, tiling.columns) == ((1, 2), (1.0,), (0.25, 0.75))
    assert tiling.borders == (0, 1, 12)
    written = Plan.from_json(content).to_json()
    assert Plan.from_json(written) == Plan.from_json(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tiled_stage(grid=[2, 2]), "stages[0].devices: they have 2 tiles of 4"),
        (tiled_stage(grid=[2]), "stages[0].grid: expected 2 items"),
        (tiled_stage(grid=[2**40, 2]), "stages[0].grid: at most 4096 tiles"),
        (tiled_stage(groups=[[0, 1], [2, 12]]), "stages[0].groups: [first, end) follow"),
        (tiled_stage(groups=[[0, 11]]), "stages[0].groups: they end at layer 11, the stage at 12"),
        (tiled_stage(rows=[0]), "stages[0].rows[0]: expected at least"),
        (tiled_stage(allocation="samples"), "a tiled stage has a grid and groups, and no other"),
        (tiled_stage(aligned=1), "stages[0].aligned: expected true or false"),
    ],
)
def test_a_tiled_stage_fits_its_grid(change: Change, message: str) -> None:
    content = copy.deepcopy(CONTENT)
    change(content)
    with pytest.raises(OptionError, match=re.escape(message)):
        Plan.from_json(content)
