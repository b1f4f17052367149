"""Intel's graphics cards."""

from __future__ import annotations

import torch

from p2ptrain.devices.streamed import StreamedDevice


class XpuDevice(StreamedDevice):
    """One card.

    Args:
        index: as `torch.xpu` counts them.
    """

    def __init__(self, index: int) -> None:
        super().__init__(torch.xpu, torch.device("xpu", index))

    def allow_fast_math(self, *, allowed: bool) -> None:
        """Sums in any order; oneDNN rounds no operand unless it is asked to."""
        torch.backends.mkldnn.deterministic = not allowed  # type: ignore[assignment]
