"""What a job's part on this device needs of the device around it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.assignment import Assignment
from p2ptrain.messages.stage_reports import FailureReport
from p2ptrain.runtime.device import LocalDevice
from p2ptrain.state.transfer_server import TransferServer
from p2ptrain.worker.device_profile import DeviceProfiler


@dataclass(frozen=True)
class WorkerContext:
    """What a participation uses of its device.

    Attributes:
        on_failure: (assignment, stage, error) reports to the holder.
        notify_holder: (assignment, report) sends the holder another `train.failed`.
        waits: called when the job stands still until the device of that id is back.
        changed: called when the phase of the worker has changed.
    """

    mesh: Mesh
    states: TransferServer
    shell: LocalDevice
    measures: DeviceProfiler
    on_failure: Callable[[Assignment, int, BaseException], Awaitable[None]]
    notify_holder: Callable[[Assignment, FailureReport], Coroutine[Any, Any, None]]
    waits: Callable[[str], None]
    changed: Callable[[], None]
