"""Where torch changes the library: convolutions of one position each, on one thread.

With one thread torch computes convolutions with a 1x1 kernel itself below 16 samples and leaves
them to oneDNN from there on (`use_mkldnn`, ATen/native/Convolution.cpp); all others are oneDNN's.
So a sample of ResNet-50 takes 55 ms in a batch of 15 and 31 ms in one of 16, on one core, and what
small batches take says little of larger ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from p2ptrain.model.description import ModelDescription
from p2ptrain.model.effects import named_arguments
from p2ptrain.model.graph import Node, StateRef

ONEDNN_FROM = 16
"""Samples."""
LEAST_PART = 0.1
"""Of the model's operations, in units with such a convolution: with less nothing changes much."""
_CONVOLUTIONS = frozenset(
    {"aten.conv1d.default", "aten.conv1d.padding", "aten.conv2d.default", "aten.conv2d.padding"}
)


def units_faster_with_onednn(description: ModelDescription, threads: int) -> tuple[int, ...]:
    """Units in which a sample gets cheaper at once with ONEDNN_FROM samples; none if too few.

    Args:
        threads: that torch computes with.
    """
    if threads > 1 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return ()
    nodes = description.train.nodes
    units = tuple(
        number
        for number, unit in enumerate(description.units)
        if any(_is_one_by_one(description, node) for node in nodes[unit.train[0] : unit.train[1]])
    )
    flops = [unit.flops for unit in description.units]
    return units if sum(flops[unit] for unit in units) > LEAST_PART * sum(flops) else ()


def _is_one_by_one(description: ModelDescription, node: Node) -> bool:
    if node.operator not in _CONVOLUTIONS:
        return False
    arguments: Mapping[str, Any] = dict(named_arguments(node))
    weight = arguments.get("weight")
    held = description.tensors_by_name.get(weight.name) if isinstance(weight, StateRef) else None
    return (
        held is not None
        and held.dtype == torch.float32
        and set(held.shape[2:]) == {1}
        and arguments.get("groups", 1) == 1
        and _is_one(arguments.get("stride", 1))
        and _is_one(arguments.get("dilation", 1))
    )


def _is_one(value: Any) -> bool:
    return value == 1 if isinstance(value, int) else set(value) <= {1}
