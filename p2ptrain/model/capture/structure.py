"""Nested inputs, targets and outputs of a user's model, as flat lists of tensors and back.

Only tensors travel. Everything else in the tree (flags, None, a cache object) is kept by the data
holder and put back in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from p2ptrain.errors import ScriptError


@dataclass(frozen=True, slots=True)
class Structure:
    """The shape of a tree.

    Attributes:
        spec: the containers.
        constants: by position of the leaf, every leaf that is no tensor.
    """

    spec: pytree.TreeSpec
    constants: Mapping[int, object]

    @property
    def tensors(self) -> int:
        """How many tensors the tree holds."""
        return self.spec.num_leaves - len(self.constants)

    def flatten(self, tree: Any) -> list[torch.Tensor]:
        """The tensors of `tree`, which must be built like the example was.

        Raises:
            ScriptError: it is not.
        """
        leaves, spec = pytree.tree_flatten(plain(tree))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if spec != self.spec or len(tensors) != self.tensors:
            raise ScriptError(
                "every sample must be built like the first one: the same tuples, lists and dicts "
                f"with a tensor in the same places (expected {self.spec}, got {spec})"
            )
        return tensors

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The tree with `tensors` in it, in the order of `flatten`."""
        remaining = iter(tensors)
        leaves = [
            self.constants[position] if position in self.constants else next(remaining)
            for position in range(self.spec.num_leaves)
        ]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, slots=True)
class Foreign:
    """Stands for a leaf that cannot be kept: what it holds differs from batch to batch.

    Attributes:
        what: what it is, with its article, for messages.
    """

    what: str

    @classmethod
    def of(cls, leaf: object) -> Foreign:
        """The one that stands for `leaf`."""
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            return cls("a number that follows from the batch size")
        name = type(leaf).__qualname__
        return cls(f"an {name}" if name[0] in "AEIOaeio" else f"a {name}")


class _IsLeaf(Protocol):
    def __call__(self, value: Any) -> bool: ...


def structure_of(
    tree: Any, keep: Callable[[object], object], is_leaf: _IsLeaf | None = None
) -> tuple[list[torch.Tensor], Structure]:
    """Take `tree` apart.

    Args:
        tree: containers and leaves.
        keep: maps a leaf that is no tensor to what is kept of it.
        is_leaf: containers for which it is True are not opened.
    """
    leaves, spec = pytree.tree_flatten(plain(tree), is_leaf=is_leaf)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    constants = {
        position: keep(leaf)
        for position, leaf in enumerate(leaves)
        if not isinstance(leaf, torch.Tensor)
    }
    return tensors, Structure(spec, constants)


def plain(tree: Any) -> Any:
    """`tree`, with a mapping that is no dict (a tokenizer's result) made one."""
    return dict(tree) if isinstance(tree, Mapping) and not _registered(tree) else tree


def _registered(value: object) -> bool:
    return type(value) in pytree.SUPPORTED_NODES
