"""Tensors that lie in one another's memory: a write to one is a write to the other in plain torch.

Devices get every tensor by itself, so two such tensors would drift apart without a word. One
parameter or buffer under several names is no such case: it is one tensor and travels once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from p2ptrain.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of the model.

    Attributes:
        label: what a message calls it.
        tensor: the user's own.
        changes: whether training writes to it.
    """

    label: str
    tensor: Tensor
    changes: bool

    @property
    def first(self) -> int:
        """Address of its first element."""
        return self.tensor.data_ptr()

    @property
    def end(self) -> int:
        """Address behind its last element."""
        reach = sum(
            (n - 1) * s for n, s in zip(self.tensor.shape, self.tensor.stride(), strict=True)
        )
        return self.first + (reach + 1) * self.tensor.element_size()


def repeats_itself(tensor: Tensor) -> bool:
    """Whether several of its elements are the same memory, as `.expand()` gives it."""
    return any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def refuse_shared_memory(tensors: Iterable[Placed]) -> None:
    """Refuse memory that tensors, or elements of one, have in common and training writes to.

    Raises:
        CaptureError: there is such; names the tensors.
    """
    tensors = list(tensors)
    for one in tensors:
        if one.changes and repeats_itself(one.tensor):
            raise CaptureError(
                f"elements of {one.label} lie in the same memory (.expand()), to which plain torch "
                "does not write either: make a copy with .clone()"
            )
    for one, other in _neighbours(tensors):
        if one.tensor is not other.tensor and (one.changes or other.changes) and _meet(one, other):
            raise CaptureError(
                f"{one.label} and {other.label} lie in the same memory, but devices would keep "
                "them apart. Tie the parameter or module itself (decoder.weight = encoder.weight, "
                "no .data), compute a view in forward(), or make a copy with .clone()"
            )


def _neighbours(tensors: Iterable[Placed]) -> Iterator[tuple[Placed, Placed]]:
    """Pairs whose first and last elements leave room for common ones."""
    placed = [t for t in tensors if t.tensor.numel() and t.first]
    placed.sort(key=lambda t: t.first)
    for index, one in enumerate(placed):
        for other in placed[index + 1 :]:
            if other.first >= one.end:
                break
            yield one, other


def _meet(one: Placed, other: Placed) -> bool:
    """Whether they have an element in common: columns of one matrix, for example, have none."""
    size = one.tensor.element_size()
    start = min(one.first, other.first)
    if other.tensor.element_size() != size or (one.first - other.first) % size:
        return True
    marks = torch.zeros((max(one.end, other.end) - start) // size, dtype=torch.bool)
    theirs, its = (
        marks.as_strided(t.tensor.shape, t.tensor.stride(), (t.first - start) // size)
        for t in (one, other)
    )
    theirs.fill_(True)
    return bool(its.any())
