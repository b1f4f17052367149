"""What a job's part here needs of the device around it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from p2ptrain.mesh.interface import Mesh
from p2ptrain.training.assignment import Assignment
from p2ptrain.training.compute import ComputeThread
from p2ptrain.training.epoch_links import Shell
from p2ptrain.training.making_ready import Model
from p2ptrain.training.recovery.holdings import Inventory
from p2ptrain.training.state_transfer import StateServer


class ShortOf(Protocol):
    """See `DeviceMeasures.short_of`."""

    def __call__(self, needed_bytes: int, *, engaged: bool) -> int | None:
        """The memory there is in bytes, where that is too little."""


class Expect(Protocol):
    """See `DeviceMeasures.expect`."""

    def __call__(self, needed_bytes: int, *, engaged: bool) -> None:
        """A part of a job that was planned to need so much begins."""


@dataclass(frozen=True)
class Surroundings:
    """What a participation uses of its device.

    Attributes:
        model: (digest, holder) -> its description, fetched where it is not known.
        short_of: (needed bytes, engaged) -> the memory there is in bytes, where that is too little.
        expect: (needed bytes, engaged) takes note of what a part was planned to need.
        budget_bytes: what a job may take now, beside what it takes.
        inventory: adds to a device's inventory what is not of one job: profile, speeds, memory.
        on_failure: (assignment, stage, error) tells the holder.
        told: (assignment, fields) tells the holder something else of `train.failed`.
        waits: is told that the job stands still until the device of that id is back.
        changed: called after whatever has happened.
    """

    mesh: Mesh
    compute: ComputeThread
    states: StateServer
    shell: Shell
    model: Model
    short_of: ShortOf
    expect: Expect
    budget_bytes: Callable[[], int]
    inventory: Callable[[Inventory, str], Inventory]
    on_failure: Callable[[Assignment, int, BaseException], Awaitable[None]]
    told: Callable[[Assignment, Mapping[str, Any]], Coroutine[Any, Any, None]]
    waits: Callable[[str], None]
    changed: Callable[[], None]
