"""A device measures a model, unit by unit, before anything is planned.

It takes seconds, not minutes, on devices with a fraction of a core, and needs the model's
description only: weights and samples are made up here. What comes out has the form of the units and
times of a `p2ptrain.profile/1` file and can be kept as JSON.

On one thread torch computes 1x1 convolutions itself below 16 samples and leaves them to oneDNN from
there on (`use_mkldnn` in ATen/native/Convolution.cpp); all others are oneDNN's. A sample of such a
model costs much less in a batch of 16 than in one of 15, so small batches say little of larger
ones. `units_faster_with_onednn` names the units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.processor import HOST
from p2ptrain.errors import ProtocolError, TooLarge
from p2ptrain.model.graph.description import ModelDescription, TensorKind
from p2ptrain.model.graph.effects import named_arguments
from p2ptrain.model.graph.nodes import GraphNode, StateRef
from p2ptrain.model.graph.packed_sequences import full_lengths
from p2ptrain.model.graph.values import ValueDescription
from p2ptrain.model.stage.result_sizes import refuse_too_large, shortest_packed
from p2ptrain.net.forms import Length, Range
from p2ptrain.plan.types.planning_file import Whole
from p2ptrain.plan.types.profile import Unit
from p2ptrain.plan.types.unit_times import Times, TimeTable, UnitTimes
from p2ptrain.process.memory_budget import is_out_of_memory
from p2ptrain.profiling.unit_chain import UnitChain, unmarked
from p2ptrain.profiling.unit_passes import CpuClock, TimingLimits, never
from p2ptrain.profiling.unit_timing import time_units

DEFAULT_BATCH_SIZES = (1, 4, 16)

DEFAULT_BUDGET_SECONDS = 2.5

SETTLE_SECONDS = 0.5
"""For an accelerator, before anything is timed."""

_REFERENCE_BATCH = 16
"""Batch at which bytes a sample are taken, for values that do not grow with the batch."""

MAX_UNITS = 1 << 16

_Sizes = Annotated[tuple[int, ...], Length(64)]


@dataclass(frozen=True, slots=True)
class UnitMeasurements:
    """A model measured on one device.

    A form: a process that need not be believed says it too.

    Attributes:
        input_bytes, target_bytes: per sample, as the holder sends them.
        times: wall seconds by batch size; at least the smallest that was asked for.
        wall_by_cpu: how many of them this device takes for one of processor time.
        cold: batch sizes that there was time for once, so that their times are too long.
        faster: units in which a sample gets cheaper at once with ONEDNN_FROM samples.
    """

    input_bytes: Whole
    target_bytes: Whole
    units: Annotated[tuple[Unit, ...], Length(MAX_UNITS, 1)]
    times: Times
    wall_by_cpu: Annotated[float, Range(0.0, 1e6, above=True)]
    cold: _Sizes = ()
    faster: Annotated[tuple[int, ...], Length(MAX_UNITS)] = ()

    def __post_init__(self) -> None:
        count = len(self.units)
        if self.times.unit_count != count or not set(self.faster) <= set(range(count)):
            raise ValueError(f"times of other units than its {count}")
        if not set(self.cold) <= set(self.times.sizes):
            raise ValueError("cold: sizes that were not measured")


def measure_units(
    description: ModelDescription,
    *,
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
    budget_seconds: float = DEFAULT_BUDGET_SECONDS,
    most_seconds: float = 0.0,
    enough_seconds: float = math.inf,
    every_size: bool = False,
    largest_second: bool = False,
    memory_bytes: int | None = None,
    clock: CpuClock | None = None,
    mark: Callable[[int], None] = unmarked,
    device: ComputeDevice = HOST,
) -> UnitMeasurements:
    """Run the model's units on this device and measure them.

    Call it in the thread that will train: its CPU time is what is measured, and its number of
    threads is what counts.

    Args:
        description: the captured model.
        batch_sizes: numbers of samples to time; the smallest always is.
        budget_seconds: for all sizes together. A device too slow for it measures fewer or smaller
            ones.
        most_seconds: what a slow device may take instead, for the sake of larger sizes.
        enough_seconds: of those, what it may take for more than a second size.
        every_size: measure each as it was asked for, at least once, however long it takes.
        largest_second: after the smallest; those between if there is time left.
        memory_bytes: sizes that need more are not measured; where the whole model does, units
            run one by one. None: the model is this device's own, and nothing of it is doubted.
        clock: tests bring their own.
        mark: called with the number of each unit that is about to run, WHOLE where all are.
        device: what they run on.

    Raises:
        TooLarge: a unit does not fit, by its shapes; nothing of the model has run.
        ProtocolError: what it takes cannot be known.
    """
    most = shortest_packed(description)
    if memory_bytes is not None:
        with full_lengths(most):
            refuse_too_large(description, min(batch_sizes), memory_bytes)

    faster: tuple[int, ...] = ()
    if device.is_host:
        faster = units_faster_with_onednn(description, torch.get_num_threads())
    clock = clock or CpuClock.of(device)

    def limits(room: _MemoryRoom) -> TimingLimits:
        return TimingLimits(
            *(budget_seconds, most_seconds, enough_seconds, every_size, largest_second),
            cheaper_from=ONEDNN_FROM if faster else None,
            may_run=room.may_run,
            apart=room.must_run_apart,
            settle_seconds=0.0 if device.is_host else SETTLE_SECONDS,
            is_too_large=never if device.is_host else is_out_of_memory,
        )

    with full_lengths(most):
        try:
            room = _MemoryRoom(description, memory_bytes, mark=mark, device=device)
            timing = time_units(room.chain, batch_sizes, limits(room), clock)
        except (RuntimeError, IndexError) as error:  # zero may be no length, or divide something
            if is_out_of_memory(error):
                raise
            room = _MemoryRoom(description, memory_bytes, whole=1, mark=mark, device=device)
            timing = time_units(room.chain, batch_sizes, limits(room), clock)
    saved, largest = room.chain.saved_bytes, max(room.chain.saved_bytes)

    def passing(number: int) -> int | None:
        made = [
            (size, of[number] - saved[size][number]) for size, of in room.chain.made_bytes.items()
        ]
        return max((max(math.ceil(more / size), 0) for size, more in made), default=None)

    has_backward = [not description.is_forward_only(u) for u in range(len(description.units))]
    return UnitMeasurements(
        input_bytes=_bytes_per_sample(description.crossing(0, "train"), description.longest),
        target_bytes=_bytes_per_sample(description.targets, description.longest),
        units=tuple(
            _unit(description, number, saved[largest][number] / largest, passing(number))
            for number in range(len(description.units))
        ),
        times=TimeTable(
            tuple(sorted(timing.times)),
            tuple(_where(has_backward, timing.times[size]) for size in sorted(timing.times)),
        ),
        wall_by_cpu=timing.wall_by_cpu,
        cold=timing.cold,
        faster=faster,
    )


def _where(has_backward: Sequence[bool], times: UnitTimes) -> UnitTimes:
    """Only these units have a backward; asking the others for it takes a moment too."""
    return replace(
        times,
        backward=tuple(s * has for s, has in zip(times.backward, has_backward, strict=True)),
        weight=tuple(s * has for s, has in zip(times.weight, has_backward, strict=False)),
    )


def work_on(
    description: ModelDescription,
    samples: int,
    memory_bytes: int | None,
    device: ComputeDevice = HOST,
) -> Iterator[None]:
    """Run the units again and again, one a step, as training with such micro-batches would.

    Steps may be taken in any thread that has been made ready for `device`. They raise what a unit
    raises.
    """
    chain = _MemoryRoom(description, memory_bytes, device=device).chain
    most = shortest_packed(description)
    while True:
        with full_lengths(most):
            chain.begin(samples, apart=True)
        for unit in range(chain.unit_count):
            with full_lengths(most):
                chain.prepare(unit)
                chain.forward(unit)
                chain.backward(unit)
            device.wait()
            yield


class _MemoryRoom:
    """What may be run in so much memory, by what the smaller batch sizes have kept.

    A pass needs state, its gradients, what is kept, and as much again for values on their way; the
    whole model has gradients twice, as one stage and by units, and its heap has holes: by three
    times its state, a device of 800 MiB was killed by the kernel now and then.
    """

    def __init__(
        self,
        description: ModelDescription,
        memory_bytes: int | None,
        whole: int = 0,
        mark: Callable[[int], None] = unmarked,
        device: ComputeDevice = HOST,
    ) -> None:
        by_name = description.tensors_by_name
        self._description = description
        self._memory_bytes = memory_bytes
        self._state = [
            sum(by_name[name].nbytes for name in description.state_names(unit, unit + 1))
            for unit in range(len(description.units))
        ]
        # Half of it at most for weights and gradients: the other half is for a unit's values.
        keep = memory_bytes is None or 4 * sum(self._state) <= memory_bytes
        self.chain = UnitChain(description, keep=keep, whole=whole, mark=mark, device=device)

    def must_run_apart(self, batch: int) -> bool:
        """Whether the whole model is too large; also as long as that is unknown."""
        if self._memory_bytes is None:
            return False
        return not self.chain.saved_bytes or self._whole_bytes(batch) > self._memory_bytes

    def may_run(self, batch: int) -> bool:
        """Whether a batch size would fit in one way or the other."""
        if self._memory_bytes is None:
            return True
        largest = max(2 * a + 2 * b for a, b in zip(self._state, self._kept(batch), strict=True))
        if min(self._whole_bytes(batch), 2 * largest) > self._memory_bytes:
            return False
        try:
            refuse_too_large(self._description, batch, self._memory_bytes)
        except (TooLarge, ProtocolError, ValueError):  # of this size: the smallest was none
            return False
        return True

    def _whole_bytes(self, batch: int) -> float:
        return 4 * sum(self._state) + 2 * sum(self._kept(batch))

    def _kept(self, batch: int) -> list[float]:
        """Bytes by unit."""
        known = max(self.chain.saved_bytes)
        return [saved * batch / known for saved in self.chain.saved_bytes[known]]


def _unit(
    description: ModelDescription, number: int, activation_bytes: float, passing_bytes: int | None
) -> Unit:
    last = number == len(description.units) - 1
    crossing = () if last else description.crossing(number + 1, "train")
    by_name = description.tensors_by_name
    held = [by_name[name] for name in description.state_names(number, number + 1)]
    return Unit(
        name=description.units[number].name,
        parameter_bytes=sum(t.nbytes for t in held if t.kind is TensorKind.PARAMETER),
        trainable_bytes=sum(t.nbytes for t in held if t.trainable),
        output_bytes=_bytes_per_sample(crossing, description.longest),
        activation_bytes=math.ceil(activation_bytes),
        passing_bytes=passing_bytes,
        flops=description.units[number].flops,
    )


def _bytes_per_sample(values: Sequence[ValueDescription], lengths: Sequence[int]) -> int:
    total = sum(value.nbytes(_REFERENCE_BATCH, *lengths) for value in values)
    return math.ceil(total / _REFERENCE_BATCH)


ONEDNN_FROM = 16
"""Samples."""

MIN_PART = 0.1
"""Of the model's operations, in units with such a convolution: with less nothing changes much."""

_CONVOLUTIONS = frozenset(
    {"aten.conv1d.default", "aten.conv1d.padding", "aten.conv2d.default", "aten.conv2d.padding"}
)


def units_faster_with_onednn(description: ModelDescription, threads: int) -> tuple[int, ...]:
    """Units in which a sample gets cheaper at once with ONEDNN_FROM samples; none if too few.

    Args:
        threads: that torch computes with.
    """
    if threads > 1 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return ()
    nodes = description.train.nodes
    units = tuple(
        number
        for number, unit in enumerate(description.units)
        if any(_is_one_by_one(description, node) for node in nodes[unit.train[0] : unit.train[1]])
    )
    flops = [unit.flops for unit in description.units]
    return units if sum(flops[unit] for unit in units) > MIN_PART * sum(flops) else ()


def _is_one_by_one(description: ModelDescription, node: GraphNode) -> bool:
    if node.operator not in _CONVOLUTIONS:
        return False
    arguments: Mapping[str, Any] = dict(named_arguments(node))
    weight = arguments.get("weight")
    held = description.tensors_by_name.get(weight.name) if isinstance(weight, StateRef) else None
    return (
        held is not None
        and held.dtype == torch.float32
        and set(held.shape[2:]) == {1}
        and arguments.get("groups", 1) == 1
        and _is_one(arguments.get("stride", 1))
        and _is_one(arguments.get("dilation", 1))
    )


def _is_one(value: Any) -> bool:
    return value == 1 if isinstance(value, int) else set(value) <= {1}
