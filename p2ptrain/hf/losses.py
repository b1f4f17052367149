"""Losses as transformers' Trainer computes them, where the model's own is not just taken.

With label smoothing, or a function of the user's, the labels are taken out of the batch, the model
is called with the rest, and the loss with its output and the labels: a pair (batch, labels).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from p2ptrain.errors import ScriptError

LABELS = "labels"


def without_labels(collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """`collate`, with pairs (the batch without its labels, its labels)."""
    return _Pairs(collate)


class _Pairs:
    """A class, so that workers of any start method can have it."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        batch = dict(self._collate(samples))
        if LABELS not in batch:
            raise ScriptError(
                "the batches have no labels, which label smoothing and compute_loss_func need"
            )
        labels = batch.pop(LABELS)
        return batch, labels


def is_causal(model: Any) -> bool:
    """Whether position i of the model's output predicts token i + 1."""
    return type(without_adapters(model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def without_adapters(model: Any) -> Any:
    """The model that PEFT's adapters are in."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def counts_unshifted(model: nn.Module) -> bool:
    """Whether transformers' Trainer counts the first label of each row, which nothing predicts.

    It counts labels from the second on where a model's class names a causal loss. Others, such as
    GPT2LMHeadModel, get that loss by default, and it counts all their labels: the loss is smaller
    by that share.
    """
    inner = without_adapters(model)
    named = LOSS_MAPPING.get(getattr(inner, "loss_type", None))
    return named is None and is_causal(inner) and inner.loss_function is ForCausalLMLoss


def leaves_count(model: nn.Module) -> bool:
    """Whether the model computes its loss without the number of items that transformers counts.

    What does use it names it, or calls `loss_function` with all further arguments (ConvNeXt calls
    it without). False where its source cannot be read.
    """
    forward = inspect.unwrap(type(without_adapters(model)).forward)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError):  # made by exec(), or lines of a text that begin at the margin
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    losses = [call for call in calls if ast.unparse(call.func).endswith("loss_function")]
    passed = {keyword.arg for call in losses for keyword in call.keywords}
    return None not in passed and "num_items_in_batch" not in ast.unparse(tree)


class UnshiftedCount:
    """The model's own causal loss, as a sum divided by all labels of a row that are not ignored."""

    def __call__(self, output: Any, batch: Any) -> Tensor:
        logits, labels = output.logits, batch[LABELS]
        loss: Tensor = ForCausalLMLoss(
            logits, labels, logits.shape[-1], num_items_in_batch=(labels != -100).sum()
        )
        return loss

    def count(self, batch: Any) -> int:
        """What the mean of a batch is taken over."""
        given = batch if isinstance(batch, dict) else batch[1]  # as the loss is given it
        return int(torch.count_nonzero(given[LABELS] != -100))


class SmoothedLoss:
    """transformers' LabelSmoother as the loss of a job: a mean over the labels not ignored.

    Args:
        shifts: position i of the output predicts label i + 1 (causal language models).
        counts_first: as `counts_unshifted`.
    """

    def __init__(self, smoother: LabelSmoother, *, shifts: bool, counts_first: bool) -> None:
        self._smoother = smoother
        self._shifts = shifts
        self._counts_from = 0 if counts_first or not shifts else 1

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        loss: Tensor = self._smoother(
            output, labels, shift_labels=self._shifts, num_items_in_batch=self._count(labels)
        )
        return loss

    def count(self, batch: Any) -> int:
        """What the mean of a batch is taken over."""
        return int(self._count(batch[1]))

    def _count(self, labels: Tensor) -> Tensor:
        counted = labels[..., self._counts_from :] if self._counts_from else labels
        return torch.count_nonzero(counted != self._smoother.ignore_index)


class UsersLoss:
    """A `compute_loss_func`; that of a whole batch, so it is not given the number of items."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        loss: Tensor = self._function(output, labels, num_items_in_batch=None)
        return loss
