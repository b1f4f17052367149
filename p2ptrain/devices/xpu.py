"""Intel's graphics cards, and the graphics in its processors."""

from __future__ import annotations

import torch

from p2ptrain.devices.interface import DeviceMemory
from p2ptrain.devices.streamed import StreamedDevice

_UNKNOWN = "querying the available free memory"
"""In what torch raises where a driver cannot say it: those of graphics in processors, and older
ones of cards."""


class XpuDevice(StreamedDevice):
    """One card.

    Args:
        index: as `torch.xpu` counts them.
    """

    def __init__(self, index: int) -> None:
        super().__init__(torch.xpu, torch.device("xpu", index))
        found = torch.xpu.get_device_properties(self.place)
        if not found.has_fp64:
            self.lacks = frozenset({"float64", "complex128"})

    def memory(self) -> DeviceMemory:
        """Where its driver does not say what is free: all that this process has not taken."""
        try:
            return super().memory()
        except RuntimeError as error:
            if _UNKNOWN not in str(error):
                raise
        total_bytes = int(torch.xpu.get_device_properties(self.place).total_memory)
        taken_bytes = int(torch.xpu.memory_reserved(self.place))
        return DeviceMemory(total_bytes - taken_bytes, total_bytes, taken_bytes)

    def allow_fast_math(self, *, allowed: bool) -> None:
        """Sums in any order; oneDNN rounds no operand unless it is asked to."""
        torch.backends.mkldnn.deterministic = not allowed  # type: ignore[assignment]
        self._allow_any_order(allowed)
