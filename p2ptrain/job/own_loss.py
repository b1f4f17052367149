"""The loss of models that compute it themselves: `loss=None`.

transformers' models return it first in their output where the batch has what it needs (labels).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from p2ptrain.errors import CaptureError
from p2ptrain.job.batch_parts import shown


def own_loss(output: Any, _target: object = None) -> Tensor:
    """The loss in a model's output: `output.loss`, `output["loss"]`, else `output[0]`.

    A tensor with one number is the loss itself.

    Raises:
        CaptureError: there is none.
    """
    loss = _found(output)
    if isinstance(loss, Tensor):
        return loss
    if loss is None:
        raise CaptureError(
            "loss=None, and the loss in the model's output is None: the batch lacks what the model "
            "computes it from. Let each batch have it (transformers: a tensor `labels`), or give a "
            "loss"
        )
    raise CaptureError(
        "loss=None, so the model must return its loss (output.loss, output['loss'] or output[0]), "
        f"and it returns {_what(output)}. Give a loss: loss=lambda output, batch: ..."
    )


def _what(output: object) -> str:
    return "a tensor of many numbers" if isinstance(output, Tensor) else shown(output)


def _found(output: Any) -> object:
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else output.dim()
    if hasattr(output, "loss"):
        return output.loss
    if isinstance(output, Mapping):
        return output.get("loss", output)
    return output[0] if isinstance(output, tuple | list) and len(output) > 0 else output
