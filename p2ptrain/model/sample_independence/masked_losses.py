"""Losses that leave some samples out or weigh them differently, as the training graph shows.

A mean over what is left is no mean over samples: a part of a micro-batch would count by its number
of samples, not by what is left of them. torch's own losses say so in their arguments. A mask made
by hand shows in what targets are compared with: those values are worth trying (`division_probe`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.effects import named_arguments
from p2ptrain.model.graph.nodes import GraphNode, InputRef, NodeRef, Reference, StateRef, TargetRef
from p2ptrain.model.graph.operators import words

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

_SAME_VALUES = words(
    """
        alias cat chunk clone constant_pad_nd contiguous detach expand flatten getitem lift_fresh
        masked_fill movedim narrow pad permute ravel reshape select slice split squeeze stack
        swapaxes t to transpose unbind unflatten unsqueeze view view_as where _to_copy _unsafe_view
    """
)

_EQUAL, _ORDERED = words("eq ne"), words("lt le gt ge")

_LEAVES = (InputRef, TargetRef)


def weighs_classes(node: GraphNode) -> bool:
    """Whether `node` is a mean of losses with a weight for each class."""
    arguments = _class_loss(node)
    return isinstance(arguments.get("weight"), NodeRef | StateRef)


def leaves_out_a_class(node: GraphNode) -> bool:
    """Whether `node` is a mean over all targets but those of a class that the user named."""
    return _ignored(node) not in (None, DEFAULT_IGNORED)


class DefaultIgnored:
    """Looks for targets that a loss leaves out by torch's default, where the user named none.

    The labels may lie among a model's inputs, as transformers take them.
    """

    def __init__(self, description: ModelDescription) -> None:
        labels = {leaf for node, leaf in _uses(description) if _ignored(node) == DEFAULT_IGNORED}
        entering = enumerate(description.crossing_values(0, "train"))
        self._inputs = [place for place, value in entering if value in labels]
        self._targets = sorted(leaf.index for leaf in labels if isinstance(leaf, TargetRef))

    @property
    def is_of_targets(self) -> bool:
        """Whether there is a loss that may leave some out, and knows them by the targets alone."""
        return bool(self._targets)

    def found_in(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
        """Whether there are any among some samples' inputs, as `crossing` lists them for boundary 0
        in training, and leaves of the targets.
        """
        labels = [*(inputs[index] for index in self._inputs)]
        labels += [targets[index] for index in self._targets]
        return any(bool((leaf == DEFAULT_IGNORED).any()) for leaf in labels)


def mask_values(description: ModelDescription) -> dict[InputRef | TargetRef, list[float]]:
    """Leaves of the batch -> what the graph compares them with: values that a mask is made of."""
    found: dict[InputRef | TargetRef, list[float]] = {}
    for node, leaf in _uses(description):
        function = node.operator.split(".")[1]
        value = node.args[1] if len(node.args) > 1 else None
        if not isinstance(value, int | float) or function not in _EQUAL | _ORDERED:
            continue
        near = [value] if function in _EQUAL else [value - 1, value, value + 1]
        known = found.setdefault(leaf, [])
        known += [number for number in near if number not in known]
    return found


def _class_loss(node: GraphNode) -> Mapping[str, object]:
    """The arguments of torch's mean over classified targets, by name; of other nodes none."""
    if node.operator not in _CLASS_LOSSES:
        return {}
    arguments = dict(named_arguments(node))
    return arguments if arguments.get("reduction", _MEAN) == _MEAN else {}


def _ignored(node: GraphNode) -> object:
    """The target that `node` leaves out of its mean; None where it is none or leaves none out."""
    arguments = _class_loss(node)
    return arguments.get("ignore_index", DEFAULT_IGNORED) if arguments else None


def _uses(description: ModelDescription) -> Iterator[tuple[GraphNode, InputRef | TargetRef]]:
    """Every node of the training graph that reads a leaf's own values, in whatever shape."""
    origins: dict[Reference, InputRef | TargetRef] = {}
    for index, node in enumerate(description.train.nodes):
        for reference in node.references():
            leaf = reference if isinstance(reference, _LEAVES) else origins.get(reference)
            if leaf is not None:
                yield node, leaf
                if node.operator.split(".")[1] in _SAME_VALUES:
                    origins[NodeRef(index)] = leaf
