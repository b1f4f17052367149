"""What a named state tensor must look like, by this device's own model description."""

from __future__ import annotations

import torch

from p2ptrain.errors import ProtocolError
from p2ptrain.model.description import ModelDescription
from p2ptrain.training.state_transfer import Check


def state_check(description: ModelDescription) -> Check:
    """A `Check` for `model:<name>` and `optimizer:<parameter>.<slot>`.

    An optimizer slot has its parameter's shape, or is a 0-dim float32 count (Adam's step).
    """
    tensors = {tensor.name: (tensor.dtype, tuple(tensor.shape)) for tensor in description.tensors}

    def check(name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        kind, _, rest = name.partition(":")
        if kind == "model" and rest in tensors:
            return tensors[rest]
        parameter, _, slot = rest.rpartition(".")
        if kind == "optimizer" and parameter in tensors:
            return (torch.float32, ()) if slot == "step" else tensors[parameter]
        raise ProtocolError(f"the state of another model: {name[:128]!r}")

    return check
