"""Apple's graphics: one memory with the processor, one queue of commands, no streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from p2ptrain.devices.processor import WallWatch


class MpsDevice(ComputeDevice):
    """The one that a Mac has."""

    name = "mps"
    place = torch.device("mps", 0)
    is_host = False
    is_in_host_memory = True
    lacks = frozenset({"float64", "complex128"})

    def __init__(self) -> None:
        self.title = title_of(torch.backends.mps)
        self.kind = f"mps {self.title}, torch {torch.__version__}"

    def host_buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Ordinary memory: the graphics reads all of it."""
        return torch.empty(elements, dtype=dtype)

    def copy_in(self, tensor: Tensor) -> Tensor:
        """In the order of the calls."""
        if tensor.device.type == self.place.type:
            return tensor
        with torch.no_grad():
            inside = tensor.detach().to(self.place)
        return inside.requires_grad_(tensor.requires_grad)

    def copy_out(
        self,
        tensors: Sequence[Value],
        into: Sequence[Value] | None = None,
        *,
        written: bool = False,
    ) -> HostCopies:
        """torch waits for the queue."""
        slots: Sequence[Value] = into or [None] * len(tensors)
        with torch.no_grad():
            pairs = zip(tensors, slots, strict=True)
            return Arrived([_copied(tensor, slot) for tensor, slot in pairs])

    def wait(self) -> None:
        """For the queue."""
        torch.mps.synchronize()

    def stopwatch(self) -> DeviceWatch:
        """Of the world's time, with the queue empty before and after."""
        self.wait()
        return _QueueWatch()

    def memory(self) -> DeviceMemory:
        """What the system recommends, less what this process has taken."""
        total_bytes = int(torch.mps.recommended_max_memory())
        taken_bytes = int(torch.mps.driver_allocated_memory())
        return DeviceMemory(max(total_bytes - taken_bytes, 0), total_bytes, taken_bytes)

    def release_cached(self) -> None:
        """Of torch's allocator."""
        torch.mps.empty_cache()

    def prepare_thread(self) -> None:
        """There is one device, and nothing to choose."""

    def allow_fast_math(self, *, allowed: bool) -> None:
        """It has one way to compute."""


def title_of(backend: Any) -> str:
    """Such as "Apple M2 Pro"; chips of other names may round in other ways."""
    name = getattr(backend, "get_name", None)
    return "Apple GPU" if name is None else str(name())


class _QueueWatch(WallWatch):
    def stop(self) -> None:
        """Once the queue is empty."""
        torch.mps.synchronize()
        super().stop()


def _copied(tensor: Value, slot: Value) -> Value:
    if tensor is None:
        return None
    return tensor.detach().cpu() if slot is None else slot.copy_(tensor.detach())
