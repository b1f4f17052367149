"""How the gradients lie that a backward of the user's is given, of which a trace knows nothing.

What stands for them lies in one piece. While training they may be one number for all elements, as
the gradient of a sum is, or turned over.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from p2ptrain.errors import CaptureError
from p2ptrain.model.derivatives import recorder
from p2ptrain.model.storage import storage_of

_ASK = frozenset({Tensor.is_contiguous, Tensor.stride})
_HANG_ON_IT = frozenset(
    {
        *(Tensor.contiguous, Tensor.reshape, Tensor.reshape_as, Tensor.flatten, Tensor.ravel),
        *(torch.reshape, torch.flatten, torch.ravel),
    }
)


class AnyLayout(TorchFunctionMode):
    """Nothing is to be decided on it: not in Python, and operators that do are recorded whole.

    They would be taken apart, to nothing or to a mere view, in a model that differentiates, and
    `contiguous` in others too.
    """

    def __init__(self, function: str, arriving: Sequence[Tensor]) -> None:
        """`function`: the name of the user's, which is given `arriving`."""
        super().__init__()
        self._function = function
        self._memory = {storage_of(gradient) for gradient in arriving}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in _ASK and storage_of(args[0]) in self._memory and not _is_torch(sys._getframe(1)):
            raise CaptureError(
                f"{self._function}.backward decides on how a gradient lies in memory, which hangs "
                "on what comes after it. Call gradient.contiguous() in any case: where there is "
                "nothing to do it does nothing"
            )
        recording = recorder() if func in _HANG_ON_IT else None
        if recording is None:
            return func(*args, **given)
        before, recording.pre_dispatch = recording.pre_dispatch, True
        called = _contiguous if func is Tensor.contiguous else func
        try:
            return called(*args, **given)
        finally:
            recording.pre_dispatch = before


def _contiguous(tensor: Tensor, memory_format: Any = torch.contiguous_format) -> Any:
    """`tensor.contiguous()`, which does not get as far as an operator where nothing is to do.

    Of a view: the operator returns its argument then, which the trace would take for the result.
    """
    view = tensor.view_as(tensor)
    return torch.ops.aten.contiguous.default(view, memory_format=memory_format)


def _is_torch(caller: Any) -> bool:
    """torch asks for its own purposes."""
    return str(caller.f_globals.get("__name__", "")).startswith("torch.")
