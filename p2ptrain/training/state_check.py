"""What a named state tensor must look like, by this device's own model description."""

from __future__ import annotations

import torch

from p2ptrain.errors import ProtocolError
from p2ptrain.model.description import ModelDescription
from p2ptrain.model.optimizer import state_layout
from p2ptrain.model.optimizer_spec import OptimizerSpec
from p2ptrain.training.state_transfer import Check


def state_check(description: ModelDescription, spec: OptimizerSpec) -> Check:
    """A `Check` for `model:<name>` and `optimizer:<parameter>.<slot>`."""
    trainable = {
        tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for tensor in description.tensors
        if tensor.trainable
    }
    slots = state_layout(spec, trainable)
    expected = {f"model:{t.name}": (t.dtype, t.shape) for t in description.tensors}
    expected |= {f"optimizer:{name}": layout for name, layout in slots.items()}

    def check(name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        if name not in expected:
            raise ProtocolError(f"the state of another model: {name[:128]!r}")
        return expected[name]

    return check
