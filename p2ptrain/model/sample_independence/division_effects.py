"""What dividing a micro-batch by samples between devices would change, read from the graph.

Whole micro-batches can always be dealt: each is computed as one device would. A part of one is
computed without the other samples, which shows where a node looks across samples (batch
normalisation) or draws random numbers for all of them at once (dropout). Losses that are no mean
over what they count (`class_losses`) are found by trying (`division_probe`).

A loss may leave padding out by `target != 0`: whether it does shows with such a target only, so
what the graph compares leaves of a batch with is tried too (`mask_values`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.effects import (
    draws_random_numbers,
    scales_by_frequency,
    uses_batch_statistics,
)
from p2ptrain.model.graph.nodes import GraphNode, InputRef, NodeRef, Reference, TargetRef
from p2ptrain.model.graph.operators import words
from p2ptrain.model.graph.values import sample_dimension


def indivisible_boundaries(description: ModelDescription) -> tuple[int, ...]:
    """Boundaries where something crosses that cannot be cut between samples.

    A stage that divides micro-batches by samples may neither begin nor end there. The model's
    inputs are boundary 0; the last boundary's loss is a number of its own for each part.
    """
    return tuple(
        boundary
        for boundary in range(len(description.units))
        if any(sample_dimension(v) is None for v in description.crossing(boundary, "train"))
    )


def division_effects(description: ModelDescription) -> tuple[str, ...]:
    """How results change where a micro-batch is divided by samples; empty if not at all.

    Up to the order in which gradients are added, which any division changes.
    """
    found = []
    for seen, reason in _EFFECTS:
        units = [u for u in range(len(description.units)) if any(map(seen, _nodes(description, u)))]
        if units:
            found.append(f"{reason} ({_named(description, units)})")
    return tuple(found)


def statistics_effects(description: ModelDescription) -> tuple[str, ...]:
    """Those of `division_effects` that depend on how many samples are computed together, and no
    more: BatchNorm's statistics and random numbers."""
    kept = frozenset(reason for seen, reason in _EFFECTS if seen in _BY_SIZE)
    found = division_effects(description)
    return tuple(effect for effect in found if effect.rpartition(" (")[0] in kept)


_EFFECTS: Sequence[tuple[Callable[[GraphNode], bool], str]] = (
    (uses_batch_statistics, "BatchNorm statistics are those of each part of a micro-batch"),
    (draws_random_numbers, "dropout and its like draw other random numbers"),
    (scales_by_frequency, "embeddings divide gradients by how often a part has each index"),
)

_BY_SIZE = (uses_batch_statistics, draws_random_numbers)


def _nodes(description: ModelDescription, unit: int) -> Sequence[GraphNode]:
    return description.train.nodes[slice(*description.units[unit].train)]


def _named(description: ModelDescription, units: Sequence[int]) -> str:
    first = description.units[units[0]].name
    if len(units) == 1:
        return f"layer {first}"
    return f"layer {first} and {len(units) - 1} more"


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
