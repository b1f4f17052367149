"""A model computing in double precision, whatever its types are, for what rounding would hide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from p2ptrain.model.description import ModelDescription
from p2ptrain.model.graph import Argument, Node

_DOUBLE: Mapping[object, torch.dtype] = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def in_double(tensor: Tensor) -> Tensor:
    """What is no whole number, as one of double precision; a tensor that is that already itself."""
    return tensor.to(_DOUBLE.get(tensor.dtype, tensor.dtype))


def computing_in_double(description: ModelDescription) -> ModelDescription:
    """Its training graph where nothing is cast to less; what it says of values stays."""
    nodes = tuple(map(_doubled, description.train.nodes))
    return replace(description, train=replace(description.train, nodes=nodes))


def _doubled(node: Node) -> Node:
    named = tuple((name, _argument(argument)) for name, argument in node.kwargs)
    return replace(node, args=tuple(map(_argument, node.args)), kwargs=named)


def _argument(argument: Argument) -> Argument:
    if isinstance(argument, tuple):
        return tuple(map(_argument, argument))
    return _DOUBLE.get(argument, argument) if isinstance(argument, torch.dtype) else argument
