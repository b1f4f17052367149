"""What a stage takes is known before it is fetched, and refused where there is no room for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.messages.assignment import Assignment, StageAssignment
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.plan.types.allocation import Allocation, TileShape
from p2ptrain.plan.types.memory_budgets import MemoryBudgets, MemoryShortage
from p2ptrain.recovery.version import Version
from p2ptrain.worker.generation_builder import (
    ShortOf,
    StageTooLarge,
    refuse_large_stages,
    stage_bytes,
)
from tests.support import zoo
from tests.support.reference import stack

MIB = 1 << 20


@pytest.fixture(scope="module")
def model() -> ModelDescription:
    made = zoo.make("cnn")
    return capture(made.model, made.loss, stack(made.data[:3])).description


def _assignment(model: ModelDescription, place: StageAssignment, **changes: int) -> Assignment:
    fields = {"batch_size": 4096, "micro_batch": 1024} | changes
    rest = StageAssignment(place.end, len(model.units), 1, ("z",), (1,))
    return Assignment(
        GenerationKey("job", 1),
        "h",
        model.digest,
        (place, rest),
        optimizer=SGD(),
        seed=0,
        clip=False,
        version=Version(0, 0),
        **fields,
    )


def _bytes(
    model: ModelDescription, place: StageAssignment, ratio: float = 0.0, **changes: int
) -> int:
    assignment = _assignment(model, place, **changes)
    return stage_bytes(assignment, model, place, "a", ratio).compute_bytes


def test_more_samples_depth_or_state_take_more(model: ModelDescription) -> None:
    alone = StageAssignment(0, 2, 1, ("a",), (1,))
    one = _bytes(model, alone)
    assert _bytes(model, alone, micro_batch=2048) > 1.9 * one
    assert one < _bytes(model, replace(alone, warmup=2)) < 2 * one + MIB
    assert _bytes(model, replace(alone, warmup=9)) == _bytes(model, replace(alone, warmup=4))
    assert _bytes(model, alone, ratio=2.0) > one
    assert _bytes(model, alone, evaluated=1 << 16) > 10 * one
    samples = replace(alone, devices=("a", "b"), shares=(256, 768))
    assert _bytes(model, samples) < 0.3 * one
    dealt = replace(samples, shares=(1, 3), allocation=Allocation.MICRO_BATCHES, warmup=3)
    assert _bytes(model, dealt) == one


def test_tiles_take_their_part_of_the_maps(model: ModelDescription) -> None:
    alone = StageAssignment(0, 2, 1, ("a",), (1,))
    shape = TileShape((1, 1), (2,), (0, 2))
    both = replace(alone, devices=("a", "b"), shares=(1, 1))
    tiled = replace(both, allocation=Allocation.TILES, tiling=shape)
    assert 0.4 < _bytes(model, tiled) / _bytes(model, alone) < 0.6


def test_more_than_there_is_is_refused_whatever_the_plan_says(model: ModelDescription) -> None:
    place = StageAssignment(0, 2, 1, ("a",), (1,))
    assignment, asked = _assignment(model, place), list[int]()

    def short_of(needed: MemoryBudgets) -> MemoryShortage | None:
        asked.append(needed.compute_bytes)
        return MemoryBudgets(MIB).shortage(needed)

    def refuse(device: str, planned_bytes: int, short_of: ShortOf = short_of) -> None:
        planned = MemoryBudgets(planned_bytes)
        refuse_large_stages(assignment, model, device, 0.0, planned, short_of, apart=False)

    with pytest.raises(StageTooLarge, match=r"layers 0 to 1 need .* of memory \(.* in the plan\)"):
        refuse("a", 1000)
    with pytest.raises(StageTooLarge) as caught:
        refuse("a", asked[0] // 2)
    has_bytes = caught.value.short.has.compute_bytes
    assert 0 < has_bytes < asked[0] // 2, "a plan must be smaller to be made again"
    refuse("a", 0, lambda needed: None)
    refuse("a", asked[0])
    assert len(asked) == 2, "what was planned has room"
    refuse("b", 0)
