"""What batches count, and so which part of a mini-batch each of its micro-batches is.

A loss that is a mean over valid tokens is no mean over samples: weighed by their samples, parts of
a mini-batch would train something else than the whole. So each is weighed by what it counts:

    mini-batch     1200 valid tokens
    micro-batches  700                    500                  weights 700/1200, 500/1200
    slices         400 | 300              500                  of devices that divide the first

Weights are computed on the holder, which alone has the user's `normalizer`, and go with the targets
to the devices that compute the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from p2ptrain.errors import ScriptError
from p2ptrain.holder.input.checked_dataset import Collated
from p2ptrain.job.user_code import RAISED, describe_user_error, doings
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.nodes import GraphNode, InputRef, NodeRef, TargetRef
from p2ptrain.model.sample_independence.class_losses import ClassLosses, Leaves
from p2ptrain.model.stage.embedding_rows import EMBEDDING

Batch: TypeAlias = tuple[Collated, Collated]
"""The model's input and the loss's target."""

Limits: TypeAlias = tuple[int, int]
"""Samples [first, end) of a micro-batch."""

Slices: TypeAlias = Callable[[int, int], Sequence[Limits]]
"""(micro-batch, its samples) -> the slices whose losses are computed each by itself."""


class BatchCount(Protocol):
    """What the loss's mean is taken over."""

    def of(self, batch: Batch) -> float:
        """Of that batch, at least 0. Raises ScriptError: it cannot be counted."""


class TargetCount:
    """Counts the targets that a loss does not leave out, or the weights of their classes."""

    def __init__(self, captured: Captured, losses: ClassLosses) -> None:
        self._captured = captured
        self._losses = losses

    def of(self, batch: Batch) -> float:
        """See the class; the samples where targets are no classes, which training says."""
        inputs = self._captured.flatten_input(batch[0])
        leaves = leaves_of(inputs, self._captured.targets(batch))
        try:
            return self._losses.count(leaves)
        except (RuntimeError, IndexError):
            return float(len(inputs[0]))


class NormalizerCount:
    """The user's `normalizer`.

    Args:
        is_dict: batches are dicts that are passed as `model(**batch)`, else pairs.
    """

    def __init__(self, normalizer: Callable[[Any], Any], *, is_dict: bool) -> None:
        self._normalizer = normalizer
        self._is_dict = is_dict

    def of(self, batch: Batch) -> float:
        """See the class.

        Raises:
            ScriptError: it raised, or gave no number of at least 0.
        """
        try:
            with doings.doing("the normalizer"):
                given = self._normalizer(batch[0] if self._is_dict else batch)
                count = float(given)
        except RAISED as error:
            raise ScriptError(f"the normalizer failed: {describe_user_error(error)}") from error
        if not math.isfinite(count) or count < 0:
            raise ScriptError(
                f"the normalizer gave {given}; it must give what the batch counts: a number of at "
                "least 0, such as that of its valid tokens"
            )
        return count


@dataclass(frozen=True, slots=True)
class MicroBatchWeights:
    """Of the slices of one micro-batch.

    Attributes:
        by_first: first sample of a slice -> its part of the mini-batch.
        counts_nothing: the whole mini-batch counts nothing.
    """

    by_first: Mapping[int, float]
    counts_nothing: bool

    @property
    def whole(self) -> float:
        """Of the micro-batch."""
        return sum(self.by_first.values())


def weigh(
    count: BatchCount, pieces: Sequence[Batch], slices: Sequence[Sequence[Limits]]
) -> list[MicroBatchWeights]:
    """The weights of a mini-batch's micro-batches.

    Args:
        pieces: its micro-batches.
        slices: of each.

    Raises:
        ScriptError: it cannot be counted.
    """
    total = count.of(_joined(pieces))
    found = []
    for piece, limits in zip(pieces, slices, strict=True):
        samples = samples_of(piece)
        counts = {
            first: total if len(pieces) == 1 and end - first == samples else count.of(part)
            for first, end in limits
            for part in [piece if end - first == samples else rows(piece, first, end)]
        }
        weights = {first: part / total if total else 0.0 for first, part in counts.items()}
        found.append(MicroBatchWeights(weights, counts_nothing=not total))
    return found


_SAME_VALUES = frozenset({"view", "reshape", "flatten", "alias", "to", "_to_copy", "contiguous"})
"""Operators, whatever their overload, that may stand between token ids and their embedding."""


def token_place(description: ModelDescription) -> int | None:
    """Position of the token ids among the values that enter the first unit; None without any.

    Token ids are what an embedding reads, of two dimensions or more.
    """
    nodes = description.train.nodes
    entering = description.crossing_values(0, "train")
    for node in nodes:
        read = node.args[1] if node.operator == EMBEDDING else None
        while isinstance(read, NodeRef) and _keeps_values(nodes[read.index]):
            read = next(nodes[read.index].references(), None)
        if isinstance(read, InputRef) and len(description.inputs[read.index].dimensions) > 1:
            return entering.index(read)
    return None


def _keeps_values(node: GraphNode) -> bool:
    return node.operator.split(".")[1] in _SAME_VALUES


def leaves_of(inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Leaves:
    """By what a graph calls them; all leaves of both."""
    named: dict[InputRef | TargetRef, Tensor] = {InputRef(k): t for k, t in enumerate(inputs)}
    return named | {TargetRef(k): t for k, t in enumerate(targets)}


def rows(batch: Batch, first: int, end: int) -> Batch:
    """Those samples of it."""
    cut: Batch = tree_map(lambda leaf: leaf[first:end] if _is_leaf(leaf) else leaf, batch)
    return cut


def samples_of(batch: Batch) -> int:
    """How many it has."""
    return next(len(leaf) for leaf in torch.utils._pytree.tree_leaves(batch) if _is_leaf(leaf))


def _joined(pieces: Sequence[Batch]) -> Batch:
    if len(pieces) == 1:
        return pieces[0]
    joined: Batch = tree_map(
        lambda *leaves: torch.cat(leaves) if _is_leaf(leaves[0]) else leaves[0], *pieces
    )
    return joined


def _is_leaf(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
