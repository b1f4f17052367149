"""NVIDIA's cards, and AMD's by ROCm, which torch calls by the same name."""

from __future__ import annotations

import os
from typing import Any

import torch

from p2ptrain.devices.streamed import StreamedDevice

_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""With which cuBLAS adds in the same order every time; read when it is first used."""


class CudaDevice(StreamedDevice):
    """One card.

    Args:
        index: as `torch.cuda` counts them.
    """

    def __init__(self, index: int) -> None:
        os.environ.setdefault(*_WORKSPACE)
        super().__init__(torch.cuda, torch.device("cuda", index))
        found = torch.cuda.get_device_properties(self.place)
        if torch.version.hip is None and hasattr(found, "uuid"):
            self.nvidia_id = f"GPU-{found.uuid}"
        maker = "rocm" if torch.version.hip else "cuda"
        self.kind = f"{maker} {found.major}.{found.minor} {self.title}, torch {torch.__version__}"

    def allow_fast_math(self, *, allowed: bool) -> None:
        """Operands of 10 bits, a search for the fastest algorithm, sums by atomics."""
        torch.backends.cuda.matmul.allow_tf32 = allowed
        cudnn: Any = torch.backends.cudnn
        cudnn.allow_tf32 = cudnn.benchmark = allowed
        cudnn.deterministic = not allowed
        for part in (cudnn.conv, cudnn.rnn):  # where a script may have allowed it for all of torch
            part.fp32_precision = "tf32" if allowed else "ieee"
        self._allow_any_order(allowed)
