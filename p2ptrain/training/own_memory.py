"""No two stages of one device are made of the same memory.

What was trained here is taken over as it is. Where one stage had the units of two that share a
weight, both would be that weight's memory, and the optimizer of each would update it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from p2ptrain.model.wire import copy_into


class OwnMemory:
    """What the stages of one epoch here are made of, so far."""

    def __init__(self) -> None:
        self._taken: set[int] = set()  # where the memory of tensors begins

    def of(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """For one more stage: a copy of what an earlier one is made of. For the compute thread."""
        own = {
            name: copy_into(None, tensor) if _begin(tensor) in self._taken else tensor
            for name, tensor in state.items()
        }
        self._taken.update(map(_begin, own.values()))
        return own


def _begin(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
