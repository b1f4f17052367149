"""What of a batch the model is given, what its loss is given, and a model's own loss.

    pair        model(x), loss(output, y)
    dict        model(**batch), and the loss is in its output         loss=None
    dict        model(**batch), loss(output, batch)                   a loss

Mappings of any class (a tokenizer's result) become dicts, because the form of an input decides how
the model is called; tuples keep their type, named ones too. transformers' models return their own
loss first in their output where the batch has what it needs (labels).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from p2ptrain.errors import CaptureError, ScriptError


class BatchParts(NamedTuple):
    """A batch, or one sample, in two.

    Attributes:
        input: a tuple is passed as `model(*input)`, a dict as `model(**input)`.
        target: the loss's second argument; None where the model computes the loss itself.
    """

    input: Any
    target: Any


def split_batch(batch: Any, *, own_loss: bool, name: str = "data[0]") -> BatchParts:
    """Split a batch or a sample.

    Args:
        own_loss: whether the model computes its loss itself (`loss=None`).
        name: how an error calls it.

    Raises:
        ScriptError: it is no pair and no dict, or a pair without a loss.
    """
    if isinstance(batch, Mapping):
        given = as_dicts(batch)
        if not all(isinstance(key, str) for key in given):
            raise ScriptError(
                f"{name} is a dict whose keys are no strings, so it cannot be passed as "
                "model(**batch)"
            )
        return BatchParts(given, None if own_loss else given)
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ScriptError(
            f"{name} must be a pair (input, target), or a dict for model(**batch), not "
            f"{shown(batch)}{_as_pair(batch, own_loss=own_loss)}"
        )
    if own_loss:
        raise ScriptError(
            f"{name} is a pair (input, target), and loss=None: a model that computes its loss "
            "itself is given a dict, model(**batch). Give such dicts (collate_fn of a DataLoader), "
            "or a loss"
        )
    return BatchParts(as_dicts(batch[0]), as_dicts(batch[1]))


def _as_pair(batch: Any, *, own_loss: bool) -> str:
    """How to write what has more than two parts; "" where it has not."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 3:
        return ""
    if own_loss:
        return (
            ". With loss=None give dicts with the names that forward() takes: "
            "torch.utils.data.StackDataset(x=x, y=y) makes them"
        )
    return (
        ". Put the inputs together, ((x, z), y) for model(x, z), or the targets, (x, (y, z)) for "
        "loss(output, (y, z)): StackDataset(StackDataset(x, z), y) of torch.utils.data makes "
        "such samples of tensors. Or give dicts, for model(**batch) and loss(output, batch)"
    )


def as_dicts(value: Any) -> Any:
    """`value` with every mapping in it a dict, whatever its class was."""
    if isinstance(value, Mapping):
        return {key: as_dicts(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [as_dicts(item) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return tuple(items) if isinstance(value, tuple) else items
    return value


def shown(value: object) -> str:
    """What it is, for an error."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    kind = type(value).__name__
    return f"an {kind}" if kind[0] in "AEIOaeio" else f"a {kind}"


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
