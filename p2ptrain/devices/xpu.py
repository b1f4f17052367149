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

    def _compute_alike(self) -> None:
        """oneDNN rounds no operand unless it is asked to."""
        torch.backends.mkldnn.deterministic = True  # type: ignore[assignment]
