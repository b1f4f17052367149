"""What the leaves of a batch are compared with in the training graph: values of masks made by hand.

A loss may leave padding out by `target != 0`: whether it does shows with such a target only, so
these values are tried (`division_probe`).
"""

from __future__ import annotations

from collections.abc import Iterator

from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.nodes import GraphNode, InputRef, NodeRef, Reference, TargetRef
from p2ptrain.model.graph.operators import words

_SAME_VALUES = words(
    """
        alias cat chunk clone constant_pad_nd contiguous detach expand flatten getitem lift_fresh
        masked_fill movedim narrow pad permute ravel reshape select slice split squeeze stack
        swapaxes t to transpose unbind unflatten unsqueeze view view_as where _to_copy _unsafe_view
    """
)

_EQUAL, _ORDERED = words("eq ne"), words("lt le gt ge")

_LEAVES = (InputRef, TargetRef)


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
