"""What autograd's own graph of a loss shows while the model is traced."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from p2ptrain.model.derivatives import unrecorded
from p2ptrain.model.storage import storage_of

_tls: Any = torch._C

Edge: TypeAlias = tuple[Any, int]
"""Where a gradient arrives: a node of autograd's, or None; the number of its output."""


def edge_of(value: Tensor) -> Edge:
    """Where the gradient of `value` arrives."""
    with _tls.DisableTorchFunction():  # what is in force during a trace would wrap the node
        return value.grad_fn, value.output_nr


def edges_reached(loss: Tensor) -> set[Edge]:
    """Where gradients of `loss` arrive; an own backward says in `gives` what it gives any to."""
    edges = [edge_of(loss)]
    reached: set[Edge] = set()
    passed: set[Any] = set()
    while edges:
        node, number = edges.pop()
        if node is None:
            continue
        reached.add((node, number))
        if node not in passed:
            passed.add(node)
            gives = getattr(node, "gives", None) or [True] * len(node.next_functions)
            edges += [e for e, given in zip(node.next_functions, gives, strict=True) if given]
    return reached


def kept_memory(loss: Tensor) -> frozenset[int]:
    """The memory of all tensors that the nodes on the way of gradients have saved."""
    with unrecorded(), _tls.DisableTorchFunction():
        return frozenset(
            storage_of(leaf)
            for node in {node for node, _ in edges_reached(loss)}
            for leaf in pytree.tree_leaves(_saved(node))
            if isinstance(leaf, Tensor)
        )


def _saved(node: Any) -> list[Any]:
    """What a node says that it has saved; of a function of the user's all that its context has."""
    names = [name for name in dir(node) if name.startswith("_saved_")]
    own = getattr(node, "own", None)
    return [*(getattr(node, name) for name in names), *([] if own is None else vars(own).values())]
