"""Which memory autograd keeps for the backward of a loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from p2ptrain.model.derivatives import unrecorded

_tls: Any = torch._C


def kept_memory(loss: Tensor) -> frozenset[int]:
    """The memory of all tensors that nodes of autograd's have saved, also those of the user's.

    To be called while a model is traced.
    """
    with unrecorded(), _tls.DisableTorchFunction():
        return frozenset(
            memory_of(leaf)
            for node in _nodes(loss.grad_fn)
            for leaf in pytree.tree_leaves(_saved(node))
            if isinstance(leaf, Tensor)
        )


def memory_of(tensor: Tensor) -> int:
    """The same for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


def _nodes(last: Any) -> Iterator[Any]:
    waiting, passed = [last], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in passed:
            passed.add(node)
            waiting += [before for before, _ in node.next_functions]
            yield node


def _saved(node: Any) -> list[Any]:
    """What a node says that it has saved; of a function of the user's all that its context has."""
    names = [name for name in dir(node) if name.startswith("_saved_")]
    own = getattr(node, "own", None)
    return [*(getattr(node, name) for name in names), *([] if own is None else vars(own).values())]
