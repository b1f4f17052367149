"""State that a training graph writes to while it computes, before any update.

Buffers: running statistics and counters change with every forward. A round that is abandoned and
repeated must not count them twice, so a stage keeps them as they were when the round began.

Parameters: a weight that is clamped, a codebook that follows its inputs. Plain torch computes a
micro-batch's backward before the next one's forward; in a stage other forwards come in between:

    plain torch   F0 writes w, B0 reads it, F1 writes w, B1 reads it
    a stage       F0 writes w, F1 writes w, B0 reads it, B1 reads it

So each forward computes with its own copies, which become the stage's tensors at its end. Users
write to `.data`, which hides the write from autograd, so that the same micro-batch's backward reads
what the forward left. In the graph that is a `detach`, which hides nothing, so every write to these
tensors is hidden here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from p2ptrain.model.graph.custom_operators import OWN_BACKWARD
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.effects import aliased_references, memory_of, mutated_references
from p2ptrain.model.graph.nodes import GraphNode, Reference, StateRef
from p2ptrain.model.stage.embedding_rows import EMBEDDING
from p2ptrain.model.wire.tensor_codec import copy_into, like


def written_names(description: ModelDescription, first: int, end: int) -> frozenset[str]:
    """The tensors of the state that training writes in units [first, end), also through views."""
    start, stop = description.node_range(first, end, "train")
    nodes = description.train.nodes
    return names_written(nodes[start:stop], state_views(nodes, start, stop))


def unchanging_names(description: ModelDescription) -> frozenset[str]:
    """The tensors of the state that no update and no forward of training changes."""
    written = written_names(description, 0, len(description.units))
    return frozenset(
        tensor.name
        for tensor in description.tensors
        if not tensor.trainable and tensor.name not in written
    )


def names_written(
    nodes: Iterable[GraphNode], views: Mapping[Reference, frozenset[str]]
) -> frozenset[str]:
    """The tensors of the state that some of `nodes` writes; `views` as `state_views` gives it."""
    return frozenset(
        name
        for node in nodes
        for reference in mutated_references(node)
        for name in views.get(reference, ())
    )


def state_views(
    nodes: Sequence[GraphNode], start: int, stop: int
) -> dict[Reference, frozenset[str]]:
    """Value of nodes [start, stop) -> the tensors of the state whose memory it may share."""
    return {
        value: frozenset(one.name for one in memory if isinstance(one, StateRef))
        for value, memory in memory_of(nodes[start:stop], start).items()
    }


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


def _may_be_kept(node: GraphNode) -> bool:
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


class MutatedParameters:
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
    copy = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    copy.copy_(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy
