"""The minimum memory of a stage of another device's job, before anything of it is fetched.

The plan says what the stage should take, but it comes from another device; the model itself shows
it. Its graphs run on tensors without memory (`model.graph.result_sizes`), about 50 ms a stage, and
no real computation starts where the two do not fit what this device offers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from p2ptrain.errors import TooLarge, size_text
from p2ptrain.messages.assignment import Assignment, StageAssignment
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.stage.result_sizes import stage_needs
from p2ptrain.plan.types.allocation import Allocation, sample_ranges

KNOWN_WITHIN = 1.25
"""What is known may be so many times what torch takes: results are counted as if none of what an
operator is made of were freed before its end. A fifth of a device's memory is offered to no job."""


class StageTooLarge(TooLarge):
    """More than this device offers.

    Attributes:
        memory_bytes: what a plan may count with here, as plans count.
    """

    def __init__(self, message: str, memory_bytes: int) -> None:
        super().__init__(message)
        self.memory_bytes = memory_bytes


def refuse_large_stages(
    assignment: Assignment,
    description: ModelDescription,
    device: str,
    state_ratio: float,
    planned_bytes: int,
    short_of: Callable[[int], int | None],
) -> None:
    """Do nothing where the stages of `device` fit.

    Args:
        state_ratio: bytes that the optimizer keeps for one of a parameter.
        planned_bytes: what the plan says that they take together.
        short_of: bytes -> the memory there is, where that is too little.

    Raises:
        StageTooLarge: they do not; nothing of them has run.
        ProtocolError: they cannot be known.
        RuntimeError, IndexError, ValueError: torch refuses shapes.
    """
    places = [assignment.stages[index] for index in assignment.stages_of(device)]
    known_bytes = sum(
        stage_bytes(assignment, description, place, device, state_ratio) for place in places
    )
    needed_bytes = math.ceil(known_bytes / KNOWN_WITHIN)
    if needed_bytes <= planned_bytes:
        return  # there is room for that
    offered_bytes = short_of(needed_bytes)
    if offered_bytes is None:
        return
    units = " and ".join(f"{place.first} to {place.end - 1}" for place in places)
    raise StageTooLarge(
        f"layers {units} need {size_text(known_bytes)} of memory ({size_text(planned_bytes)} in "
        "the "
        f"plan), and this device may use {size_text(offered_bytes)}",
        int(planned_bytes * offered_bytes / known_bytes),
    )


def stage_bytes(
    assignment: Assignment,
    description: ModelDescription,
    place: StageAssignment,
    device: str,
    state_ratio: float,
) -> int:
    """Of one stage on one device, training and evaluating. Raises as `refuse_large_stages`."""
    units, samples = (place.first, place.end), assignment.micro_batch
    part = _part(place, device)
    trained = stage_needs(description, *units, "train", _samples(place, device, samples))
    values = trained.peak_bytes + (_in_flight(assignment, place) - 1) * trained.kept_bytes
    if assignment.evaluated:
        few = _samples(place, device, assignment.evaluated)
        evaluated = stage_needs(description, *units, "eval", few)
        values = max(values, evaluated.peak_bytes)
    learned = (1 + state_ratio) * trained.trainable_bytes  # gradients, and what the optimizer keeps
    return math.ceil(trained.state_bytes + learned + part * values)


def _part(place: StageAssignment, device: str) -> float:
    """Of every map, where the stage is tiled."""
    if place.tiling is None:
        return 1.0
    return place.tiling.areas(place.shares)[place.devices.index(device)]


def _samples(place: StageAssignment, device: str, samples: int) -> int:
    """Of a micro-batch that the device takes, at most."""
    if not place.shared or place.allocation is not Allocation.SAMPLES:
        return samples
    first, end = sample_ranges(place.shares, samples)[place.devices.index(device)]
    return max(end - first, 1)


def _in_flight(assignment: Assignment, place: StageAssignment) -> int:
    """Micro-batches that are kept for their backwards."""
    if place.shared and place.allocation is Allocation.MICRO_BATCHES:
        return 1  # how many of its own it has then, the plan counts
    return min(place.warmup, assignment.micro_batches)
