"""The processor: its memory is the host's, and a call has done its work when it returns."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import psutil
import torch
from torch import Tensor

from p2ptrain.devices.interface import (
    Arrived,
    ComputeDevice,
    DeviceMemory,
    DeviceWatch,
    HostCopies,
    Value,
)


class Processor(ComputeDevice):
    """See the module."""

    name = "cpu"
    title = "processor"
    kind = "cpu"
    place = torch.device("cpu")
    is_host = True

    def host_buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        """As torch's allocator gives it."""
        return torch.empty(elements, dtype=dtype)

    def copy_in(self, tensor: Tensor) -> Tensor:
        """Itself."""
        return tensor

    def copy_out(
        self,
        tensors: Sequence[Value],
        into: Sequence[Value] | None = None,
        *,
        written: bool = False,
    ) -> HostCopies:
        """Themselves, where nothing is to be filled."""
        if into is None:
            return Arrived(tensors)
        pairs = zip(tensors, into, strict=True)
        with torch.no_grad():
            return Arrived([t if t is None or slot is None else slot.copy_(t) for t, slot in pairs])

    def wait(self) -> None:
        """Everything is done."""

    def stopwatch(self) -> DeviceWatch:
        """Of the world's time."""
        return WallWatch()

    def memory(self) -> DeviceMemory:
        """Of the machine."""
        found = psutil.virtual_memory()
        taken_bytes = psutil.Process().memory_info().rss
        return DeviceMemory(int(found.available), int(found.total), int(taken_bytes))

    def release_cached(self) -> None:
        """torch keeps none."""

    def prepare_thread(self) -> None:
        """Numbers nearer to zero than 1.2e-38 are zero, in this thread alone."""
        torch.set_flush_denormal(True)

    def allow_fast_math(self, *, allowed: bool) -> None:
        """It has one way to compute."""


class WallWatch(DeviceWatch):
    """Seconds of the world between its start and `stop`."""

    def __init__(self) -> None:
        self._started = self._stopped = perf_counter()

    def stop(self) -> None:
        """Read the clock."""
        self._stopped = perf_counter()

    def seconds(self) -> float:
        """Between both."""
        return self._stopped - self._started


HOST = Processor()
"""Of this process: a processor has no state."""
