"""Tensors of the state that a forward writes to, and that its backward may read.

A weight that is clamped, a codebook that follows what it sees. Plain torch computes a micro-batch's
backward before the next one's forward; here other forwards come in between:

    plain torch   F0 writes w, B0 reads it, F1 writes w, B1 reads it
    a stage       F0 writes w, F1 writes w, B0 reads it, B1 reads it

So each forward computes with copies of its own, and what it has written becomes the stage's tensor
at its end. Users write to `.data`, which hides the write from autograd: the same micro-batch's
backward reads what the forward left. In the graph that is a `detach`, which hides nothing, so here
every write to these tensors is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from p2ptrain.model.description import ModelDescription
from p2ptrain.model.effects import aliased_references, mutated_references
from p2ptrain.model.graph import Node
from p2ptrain.model.own_backward import OWN_BACKWARD
from p2ptrain.model.row_gradients import EMBEDDING
from p2ptrain.model.written import names_written, state_views


def rewritten_names(description: ModelDescription, first: int, end: int) -> frozenset[str]:
    """What training writes in units [first, end) and autograd may keep for the backward.

    Not running statistics and counters, which no other operator reads, nor rows of a table.
    """
    start, stop = description.node_range(first, end, "train")
    nodes = description.train.nodes
    views = state_views(nodes, start, stop)
    written = names_written(nodes[start:stop], views)
    read = {
        name
        for node in nodes[start:stop]
        if _may_be_kept(node)
        for reference in node.references()
        if reference not in mutated_references(node)
        for name in views.get(reference, ())
    }
    return written & read


def _may_be_kept(node: Node) -> bool:
    """Whether autograd may keep what it reads: it records it, and it is no mere view."""
    is_view = bool(aliased_references(node)) and not mutated_references(node)
    keeps = node.operator == OWN_BACKWARD or not is_view
    return node.grad_enabled and keeps and node.operator != EMBEDDING


def hidden(call: Callable[..., Any], position: int) -> Callable[..., Any]:
    """The operator `call` without a trace, for autograd, of what it writes to that argument."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _unsafe_preserve_version_counter(args[position]):
            return call(*args, **kwargs)

    return run


class Rewritten:
    """Those of one stage."""

    def __init__(self, names: Collection[str], state: Mapping[str, Tensor]) -> None:
        """`state`: the stage's tensors, by name."""
        self._tensors = {name: state[name] for name in sorted(names)}

    def copies(self) -> dict[str, Tensor]:
        """For one micro-batch, by name."""
        return {name: _copy(tensor) for name, tensor in self._tensors.items()}

    def take(self, copies: Mapping[str, Tensor]) -> None:
        """What a forward has written is the stage's now."""
        for name, copy in copies.items():
            self._tensors[name].data.copy_(copy.detach())

    @contextmanager
    def lent(self, copies: Mapping[str, Tensor]) -> Iterator[None]:
        """A backward in here adds to the gradients of the stage's parameters."""
        for name, copy in copies.items():
            copy.grad = self._tensors[name].grad
        yield
        for name, copy in copies.items():
            self._tensors[name].grad, copy.grad = copy.grad, None


def _copy(tensor: Tensor) -> Tensor:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    copy.copy_(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy
