"""What a training graph writes to its state while it computes, before any update: buffers, mostly.

Running statistics and counters change with every forward. A round that is given up and done again
must not count them twice, so a stage keeps them as they were when the round began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from p2ptrain.model.description import ModelDescription
from p2ptrain.model.effects import aliased_references, mutated_references
from p2ptrain.model.graph import Node, NodeRef, Reference, StateRef
from p2ptrain.model.wire import copy_into, like


def written_names(description: ModelDescription, first: int, end: int) -> frozenset[str]:
    """The tensors of the state that training writes in units [first, end), also through views."""
    start, stop = description.node_range(first, end, "train")
    nodes = description.train.nodes
    return names_written(nodes[start:stop], state_views(nodes, start, stop))


def names_written(
    nodes: Iterable[Node], views: Mapping[Reference, frozenset[str]]
) -> frozenset[str]:
    """The tensors of the state that some of `nodes` writes; `views` as `state_views` gives it."""
    return frozenset(
        name
        for node in nodes
        for reference in mutated_references(node)
        for name in views.get(reference, ())
    )


def state_views(nodes: Sequence[Node], start: int, stop: int) -> dict[Reference, frozenset[str]]:
    """Value of nodes [start, stop) -> the tensors of the state whose memory it may share."""
    views: dict[Reference, frozenset[str]] = {}
    for index in range(start, stop):
        for reference in nodes[index].references():
            if isinstance(reference, StateRef):
                views[reference] = frozenset({reference.name})
        shared = [
            views.get(reference, frozenset()) for reference in aliased_references(nodes[index])
        ]
        views[NodeRef(index)] = frozenset[str]().union(*shared)
    return views


class SavedBuffers:
    """Copies of what one stage's forwards write, as it was before the round. Not thread-safe."""

    def __init__(self, written: Mapping[str, Tensor]) -> None:
        """Make room for copies of `written`, the stage's own tensors by name."""
        self._current = {name: tensor.detach() for name, tensor in written.items()}
        self._copies = {name: like(tensor) for name, tensor in self._current.items()}
        self._is_saved = False

    def save(self) -> None:
        """Copy them as they are now."""
        if self._current:
            torch._foreach_copy_(list(self._copies.values()), list(self._current.values()))
        self._is_saved = True

    def forget(self) -> None:
        """What the forwards wrote counts."""
        self._is_saved = False

    def before(self) -> Mapping[str, Tensor]:
        """The copies by name, where there are any: those the stage's own tensors have replaced."""
        return self._copies if self._is_saved else {}


class BuffersByStep:
    """What one stage's forwards write, as it was after each of the last steps. Not thread-safe.

    Where forwards of later steps have run before the update of an earlier one, a copy of that
    update's version holds what was written up to that step, no more.
    """

    def __init__(self, written: Mapping[str, Tensor]) -> None:
        """Watch `written`, the stage's own tensors by name."""
        self._current = {name: tensor.detach() for name, tensor in written.items()}
        self._after: dict[int, dict[str, Tensor]] = {}

    def note(self, step: int) -> None:
        """All forwards of `step` have run, and none of a later one."""
        if self._current:
            self._after[step] = {n: copy_into(None, t) for n, t in self._current.items()}

    def forget(self, before: int) -> None:
        """What earlier steps left is not wanted any more."""
        self._after = {step: copies for step, copies in self._after.items() if step >= before}

    def after(self, step: int) -> Mapping[str, Tensor]:
        """The copies by name; nothing where nothing is written."""
        return self._after.get(step, {})
