"""What timing runs, its clock, limits and result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.plan.types.unit_times import UnitTimes
from p2ptrain.process.cpu_share import thread_clock


class UnitRunner(Protocol):
    """A model cut into its units, run one at a time with real values flowing between them."""

    @property
    def unit_count(self) -> int:
        """How many units."""

    def warm_up(self, batch: int, *, split: bool) -> None:
        """Run the first unit forward and back with `batch` samples."""

    def begin(self, batch: int, *, split: bool, apart: bool) -> None:
        """Make inputs and targets for `batch` samples; forwards in order, then backwards follow.

        Args:
            batch: number of samples.
            split: the backwards will come in two parts.
            apart: each unit's backward will follow its forward at once, from made-up gradients.
        """

    def begin_whole(self, batch: int) -> None:
        """Make the model as one stage, with inputs and targets for `batch` samples."""

    def forward_whole(self) -> None:
        """Run all units' forwards as one stage."""

    def backward_whole(self) -> None:
        """Run the backward of that."""

    def prepare(self, unit: int) -> None:
        """Make that unit ready for its forward; this is not timed."""

    def forward(self, unit: int) -> None:
        """Run one unit's forward."""

    def backward(self, unit: int) -> None:
        """Run one unit's backward."""

    def backward_inputs(self, unit: int) -> None:
        """Run the part of one unit's backward that gives the gradients of its inputs."""

    def backward_weights(self, unit: int) -> None:
        """Run what is left of that unit's backward."""

    def forget(self) -> None:
        """Drop a pass that could not end, and what was made for it."""


@dataclass(frozen=True, slots=True)
class CpuClock:
    """Seconds, both monotonic: `wall` of the world, `cpu` used by the calling thread."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = field(default_factory=thread_clock)

    @classmethod
    def of(cls, device: ComputeDevice) -> CpuClock:
        """For passes on `device`.

        An accelerator computes while the thread continues: both clocks are the world's, once it has
        done everything. It shares no core with other programs.
        """
        if device.is_host:
            return cls()

        def done() -> float:
            device.wait()
            return time.perf_counter()

        return cls(done, done)

    @property
    def is_one(self) -> bool:
        """Both are the same: a second of computing takes a second."""
        return self.wall is self.cpu


def never(_error: BaseException) -> bool:
    """No error is expected."""
    return False


@dataclass(frozen=True, slots=True)
class TimingLimits:
    """What passes may take.

    Attributes:
        budget_seconds: for all sizes, with passes repeated where there is time.
        most_seconds: a slow device may take so long instead, for larger sizes and no repetition:
            planners must know how much cheaper a sample is in a large batch.
        may_run: whether there is memory for a batch size.
        apart: asked before each pass: whether one unit after the other runs alone.
        enough_seconds: of those, what it may take for more than a second size, half as large as
            asked for, that it has not run cold.
        every_size: each is run as it was asked for, at least once, however long it takes.
        largest_second: the largest size is measured after the smallest.
        cheaper_from: size from which a sample gets cheaper at once; None = no such size is known.
        settle_seconds: for passes before all that count, until they take equally long: clocks of
            an accelerator rise with work, and its kernels are loaded when they are first used.
        is_too_large: whether an error of a larger size says only that it needs too much memory;
            then no larger one is measured.
    """

    budget_seconds: float
    most_seconds: float = 0.0
    enough_seconds: float = inf
    every_size: bool = False
    largest_second: bool = False
    cheaper_from: int | None = None
    may_run: Callable[[int], bool] = lambda batch: True
    apart: Callable[[int], bool] = lambda batch: False
    settle_seconds: float = 0.0
    is_too_large: Callable[[BaseException], bool] = never


@dataclass(frozen=True, slots=True)
class UnitTimings:
    """What `time_units` found.

    Attributes:
        times: wall seconds by batch size, ascending.
        wall_by_cpu: the factor that made them of CPU seconds.
        cold: batch sizes that were run once, which takes longer than they will.
    """

    times: dict[int, UnitTimes]
    wall_by_cpu: float
    cold: tuple[int, ...]
