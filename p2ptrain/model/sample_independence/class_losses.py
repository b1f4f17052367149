"""What torch's losses over classes take their mean over, as the training graph shows it.

Cross entropy and NLL leave targets of `ignore_index` out and weigh classes. What they count follows
from the batch alone: the graph's nodes that lead from its leaves to a loss's targets are run here,
so labels that a model shifts, pads or masks are counted as its loss does.

    labels -- pad, [..., 1:], flatten --> targets -- how many are not ignored? --> 1483
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.effects import (
    draws_random_numbers,
    memory_of,
    mutated_references,
    named_arguments,
    uses_batch_statistics,
)
from p2ptrain.model.graph.nodes import GraphNode, InputRef, NodeRef, Reference, StateRef, TargetRef
from p2ptrain.model.graph.values import sizes_of
from p2ptrain.model.stage.instructions import Registers, Sizes, bind
from p2ptrain.model.stage.mutated_state import written_names

DEFAULT_IGNORED = -100
"""torch's `ignore_index`, always there: whether it counts depends on the data."""

_MEAN = 1

_CLASS_LOSSES = frozenset(
    f"aten.{name}.default"
    for name in (
        "cross_entropy_loss",
        "nll_loss",
        "nll_loss_nd",
        "nll_loss2d",
        "nll_loss_forward",
        "nll_loss2d_forward",
    )
)

Leaves: TypeAlias = Mapping[InputRef | TargetRef, Tensor]
"""Leaves of a batch."""


@dataclass(frozen=True, slots=True)
class _ClassLoss:
    """A mean of torch's over classified targets.

    Attributes:
        targets, weight: where they come from; weight None = all classes weigh the same.
        ignored: the target that it leaves out.
        index: of the node.
    """

    targets: Reference
    weight: Reference | None
    ignored: int
    index: int = field(compare=False)


class ClassLosses:
    """The means over classified targets in a training graph.

    Attributes:
        is_counted: there is exactly one, and what it counts follows from the batch alone.
        leaves_out_a_class: one leaves out targets of a class that the user named.
        weighs_classes: one weighs classes.
    """

    def __init__(self, description: ModelDescription, state: Mapping[str, Tensor]) -> None:
        """`state`: tensors by canonical name."""
        found: dict[_ClassLoss, None] = {}
        for index, node in enumerate(description.train.nodes):
            loss = _class_loss(node, index)
            if loss is not None:
                found[loss] = None
        self.leaves_out_a_class = any(loss.ignored != DEFAULT_IGNORED for loss in found)
        self.weighs_classes = any(loss.weight is not None for loss in found)
        self._runs = {loss: _Upstream.of(description, state, loss) for loss in found}
        self.is_counted = len(found) == 1 and None not in self._runs.values()

    def count(self, leaves: Leaves) -> float:
        """What the only one takes its mean over; `is_counted`.

        Raises:
            RuntimeError, IndexError: an operator's, or of a target that is no class.
        """
        ((loss, upstream),) = self._runs.items()
        assert upstream is not None
        targets, weight = upstream.run(leaves)
        if targets.is_floating_point():  # probabilities of classes
            return float(targets.numel())
        kept = targets[targets != loss.ignored]
        if weight is None:
            return float(kept.numel())
        return float(weight.double()[kept].sum())

    def ignored(self) -> dict[InputRef | TargetRef, list[float]]:
        """Leaves of the batch that targets follow from -> targets that are left out."""
        found: dict[InputRef | TargetRef, list[float]] = {}
        for loss, upstream in self._runs.items():
            for leaf in () if upstream is None else upstream.leaves:
                found.setdefault(leaf, []).append(loss.ignored)
        return found

    def leave_out(self, leaves: Leaves) -> bool:
        """Whether one leaves out some target of this batch, as far as that follows from it."""
        for loss, upstream in self._runs.items():
            if upstream is not None:
                targets, _ = upstream.run(leaves)
                if not targets.is_floating_point() and bool((targets == loss.ignored).any()):
                    return True
        return False


class _Upstream:
    """The nodes that lead from the batch to a loss's targets and weights."""

    def __init__(
        self,
        description: ModelDescription,
        state: Mapping[str, Tensor],
        loss: _ClassLoss,
        indices: Sequence[int],
    ) -> None:
        self._description = description
        self._loss = loss
        self._nodes = [(index, description.train.nodes[index]) for index in indices]
        self._registers: dict[Reference, int] = {}
        wanted = [loss.targets] if loss.weight is None else [loss.targets, loss.weight]
        made = [NodeRef(index) for index in indices]
        read = (reference for _, node in self._nodes for reference in node.references())
        for reference in (*wanted, *made, *read):
            self._registers.setdefault(reference, len(self._registers))
        self._initial: Registers = [None] * len(self._registers)
        for reference, register in self._registers.items():
            if isinstance(reference, StateRef):
                self._initial[register] = state[reference.name]

    @staticmethod
    def of(
        description: ModelDescription, state: Mapping[str, Tensor], loss: _ClassLoss
    ) -> _Upstream | None:
        """None where they follow from parameters, from chance, or from what training writes."""
        changing = written_names(description, 0, len(description.units)) | {
            tensor.name for tensor in description.tensors if tensor.trainable
        }
        wanted = [loss.targets] if loss.weight is None else [loss.targets, loss.weight]
        nodes = description.train.nodes[: loss.index]
        seen = _leading_to(wanted, nodes)
        read = {*wanted, *(r for index in seen for r in nodes[index].references())}
        if any(isinstance(r, StateRef) and r.name in changing for r in read):
            return None
        if any(draws_random_numbers(nodes[i]) or uses_batch_statistics(nodes[i]) for i in seen):
            return None
        return _Upstream(description, state, loss, seen)

    @property
    def leaves(self) -> list[InputRef | TargetRef]:
        """Of the batch, that are read."""
        return [leaf for leaf in self._registers if isinstance(leaf, InputRef | TargetRef)]

    def run(self, leaves: Leaves) -> tuple[Tensor, Tensor | None]:
        """The targets, and the weights of the classes."""
        registers = self._initial.copy()
        for leaf in self.leaves:
            registers[self._registers[leaf]] = leaves[leaf].clone()  # nodes may write to it
        sizes = self._sizes(leaves)
        with torch.no_grad():
            for index, node in self._nodes:
                bind(node, index, self._registers, sizes, ()).run(registers)
        weight = None if self._loss.weight is None else self._registers[self._loss.weight]
        targets = registers[self._registers[self._loss.targets]]
        return targets, None if weight is None else registers[weight]

    def _sizes(self, leaves: Leaves) -> Sizes:
        """Of the batch, and of lengths that differ from batch to batch."""
        if not self._description.longest:
            return len(next(iter(leaves.values())))
        described = self._description.inputs, self._description.targets
        shapes = (
            (described[isinstance(leaf, TargetRef)][leaf.index], tuple(value.shape))
            for leaf, value in leaves.items()
        )
        return tuple(size or 0 for size in sizes_of(shapes, len(self._description.longest)))


def entered(
    description: ModelDescription, inputs: Sequence[Tensor], targets: Sequence[Tensor]
) -> Leaves:
    """A batch's leaves: `inputs` as `crossing` lists them for boundary 0, and all its targets."""
    crossing = description.crossing_values(0, "train")
    found: dict[InputRef | TargetRef, Tensor] = {
        reference: value
        for reference, value in zip(crossing, inputs, strict=True)
        if isinstance(reference, InputRef)
    }
    return found | {TargetRef(k): value for k, value in enumerate(targets)}


def _leading_to(wanted: Sequence[Reference], nodes: Sequence[GraphNode]) -> list[int]:
    """The nodes that these values are made by, ascending; and those that write to them."""
    memory = memory_of(nodes, 0)
    writers = [(k, mutated_references(node)) for k, node in enumerate(nodes)]
    writers = [(k, references) for k, references in writers if references]
    seen: set[int] = set()
    left = list(wanted)
    touched: set[Reference] = set()
    while left:
        reference = left.pop()
        touched |= memory.get(reference, {reference})
        if isinstance(reference, NodeRef) and reference.index not in seen:
            seen.add(reference.index)
            left += nodes[reference.index].references()
        left += [
            NodeRef(k)
            for k, written in writers
            if k not in seen and any(memory[r] & touched for r in written)
        ]
    return sorted(seen)


def _class_loss(node: GraphNode, index: int) -> _ClassLoss | None:
    if node.operator not in _CLASS_LOSSES:
        return None
    arguments = dict(named_arguments(node))
    targets, weight = arguments.get("target"), arguments.get("weight")
    ignored = arguments.get("ignore_index", DEFAULT_IGNORED)
    if arguments.get("reduction", _MEAN) != _MEAN or not isinstance(targets, _REFERENCES):
        return None
    assert isinstance(ignored, int)
    return _ClassLoss(targets, weight if isinstance(weight, _REFERENCES) else None, ignored, index)


_REFERENCES = (InputRef, TargetRef, StateRef, NodeRef)
