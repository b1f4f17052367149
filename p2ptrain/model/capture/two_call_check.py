"""Whether a second call of forward() and the loss computes what the first one did.

A trace runs them once, and devices do the same for every batch. Where the first call has changed
something that the second one computes with (a flag, a counter, a hidden state), plain torch would
do something else from the second batch on. So both calls are traced one after the other, over two
batches, and compared node by node. A value of the first call that the second takes up again is
all right where it follows from constants alone: a mask that is made once, for example.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn

from p2ptrain.errors import CaptureError
from p2ptrain.model.capture.aliases import traced_aliases
from p2ptrain.model.capture.scored_module import Example
from p2ptrain.model.capture.translate import translate
from p2ptrain.model.capture.translated import Translated
from p2ptrain.model.graph.effects import draws_random_numbers, mutated_references
from p2ptrain.model.graph.nodes import GraphNode, InputRef, NodeRef, Reference, StateRef, TargetRef
from p2ptrain.model.graph.operators import resolve, words
from p2ptrain.model.tracing.autograd_graph import storage_of

_Term: TypeAlias = tuple[object, ...]

_ITSELF_UNLESS_CHANGED = words(
    """
        to contiguous type_as flatten positive real resolve_conj resolve_neg atleast_1d atleast_2d
        atleast_3d
    """
)
"""Operators that give their argument itself, no view of it, where it is as asked for already."""


class TwoCalls(nn.Module):
    """Two calls; the first one's loss is marked by a node behind all others of that call."""

    def __init__(self, scored: nn.Module) -> None:
        super().__init__()
        self.scored = scored

    def forward(self, inputs: list[Tensor], targets: list[Tensor]) -> tuple[Tensor, ...]:
        """The outputs of the first call, over the first half of the leaves, then the second's."""
        x, y = len(inputs) // 2, len(targets) // 2
        loss, *leaves = self.scored(inputs[:x], targets[:y])
        return (loss.clone(), *leaves, *self.scored(inputs[x:], targets[y:]))


def refuse_changing(changed: Sequence[str]) -> NoReturn:
    """CaptureError that names what changes from batch to batch."""
    raise CaptureError(
        "forward() or the loss changes numbers or other things that it keeps, and computes with "
        f"them ({', '.join(changed[:4])}), but devices get the model once. Keep them in a buffer "
        "that is written in place: self.register_buffer(name, torch.tensor(...))"
    )


def computes_the_same_twice(
    program: torch.export.ExportedProgram, example: Example, held: Sequence[Tensor]
) -> bool:
    """Whether both calls compute the same.

    Args:
        program: of `TwoCalls`.
        example: of one call.
        held: tensors that the user keeps outside parameters and buffers.
    """
    states = _States(program, held)
    graph = translate(program, example.twice(), states.name_of)
    middle = len(graph.outputs) // 2
    if len(graph.outputs) % 2:
        return False
    return _ComparedCalls(graph, states).same(graph.outputs[:middle], graph.outputs[middle:])


class _States:
    """Names for the tensors of a program of two calls, and what the two calls see in them."""

    def __init__(self, program: torch.export.ExportedProgram, held: Sequence[Tensor]) -> None:
        self._program = program
        self._held = {id(tensor) for tensor in held}
        self.kept: set[str] = set()
        self.trainable: set[str] = set()
        self.contents: dict[str, str] = {}

    def name_of(self, exported: str, tensor: Tensor, written: bool) -> str:
        """One name a tensor; what each call makes from numbers is named by its content too."""
        name = exported if exported in self._program.state_dict else f"constant {id(tensor)}"
        if exported in self._program.state_dict or id(tensor) in self._held:
            self.kept.add(name)
        else:
            self.contents[name] = _content(tensor)
        if tensor.requires_grad:
            self.trainable.add(name)
        return name


def _content(tensor: Tensor) -> str:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    content = hashlib.sha256(plain.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {content}"


class _ComparedCalls:
    """Terms for the nodes of two calls: equal where the same is computed from the same things."""

    def __init__(self, graph: Translated, states: _States) -> None:
        self._graph = graph
        self._states = states
        self._aliases = traced_aliases(graph)
        written = {ref.name for ref in self._aliases.mutated() if isinstance(ref, StateRef)}
        self._changing = states.trainable | written
        self._leaves = len(graph.inputs) // 2, len(graph.targets) // 2
        mark = graph.outputs[0]
        self._last = mark.index if isinstance(mark, NodeRef) else -1
        self._numbers: dict[_Term, int] = {}
        self._terms: tuple[dict[int, int], dict[int, int]] = ({}, {})

    def same(self, first: Sequence[Reference], second: Sequence[Reference]) -> bool:
        """Whether they give the same, write the same and draw the same."""
        effects: tuple[list[_Term], list[_Term]] = ([], [])
        for index, node in enumerate(self._graph.nodes):
            own = 0 if index <= self._last else 1
            for call in range(own, 2):
                self._terms[call][index] = self._number(self._node_term(node, call, own))
            if own and self._writes_to_what_is_left(node):
                return False
            if self._lasts(node):
                effects[own].append(("effect", self._terms[own][index]))
        loss = next(self._graph.nodes[self._last].references())  # what the mark is a copy of
        one = [self._reference(self._returned(output), 0, 0) for output in (loss, *first[1:])]
        other = [self._reference(self._returned(output), 1, 1) for output in second]
        return effects[0] == effects[1] and one == other

    def _node_term(self, node: GraphNode, call: int, own: int) -> _Term:
        """`node`, which runs in the call `own`, as the call `call` sees it."""
        arguments = self._argument(node.args, call, own)
        named = tuple((key, self._argument(value, call, own)) for key, value in node.kwargs)
        return (node.operator, arguments, named, node.grad_enabled)

    def _argument(self, argument: Any, call: int, own: int) -> object:
        if isinstance(argument, tuple):
            return tuple(self._argument(item, call, own) for item in argument)
        if isinstance(argument, InputRef | TargetRef | StateRef | NodeRef):
            return self._reference(argument, call, own)
        return type(argument).__name__, repr(argument)

    def _reference(self, reference: Reference, call: int, own: int) -> object:
        if call == own == 1:
            reference = self._state_behind(reference)
        match reference:
            case NodeRef(index):
                return "node", self._terms[call][index]
            case InputRef(index):
                return "input", index % self._leaves[0], index // self._leaves[0] == call
            case TargetRef(index):
                return "target", index % self._leaves[1], index // self._leaves[1] == call
            case StateRef(name):
                # What an earlier call made of a weight does not follow the weight's updates.
                stale = call != own and name in self._changing
                return "state", self._states.contents.get(name, name), stale
        raise AssertionError(reference)

    def _returned(self, output: Reference) -> Reference:
        """State that is returned as it is: both calls share the node that gives it."""
        node = self._graph.nodes[output.index] if isinstance(output, NodeRef) else None
        if node is None or node.operator != "aten.alias.default":
            return output
        (given,) = node.references()
        return given if isinstance(given, StateRef) else output

    def _state_behind(self, reference: Reference) -> Reference:
        """State for which a trace takes the first call's last node that gave it itself."""
        behind: Any = reference
        while isinstance(behind, NodeRef) and behind.index <= self._last:
            node = self._graph.nodes[behind.index]
            operator = resolve(node.operator)
            writes = 0 in operator.mutates and operator.returned == frozenset((0,))
            if not writes and not self._gives_itself(behind, node):
                return reference
            behind = node.args[0]
        kept = isinstance(behind, StateRef) and behind.name in self._states.kept
        return behind if kept else reference

    def _gives_itself(self, made: NodeRef, node: GraphNode) -> bool:
        if node.operator.split(".")[1] not in _ITSELF_UNLESS_CHANGED:
            return False
        before, after = self._graph.value_of(node.args[0]), self._graph.value_of(made)
        if not isinstance(before, Tensor) or not isinstance(after, Tensor):
            return False  # such as atleast_1d of several
        return (
            storage_of(before) == storage_of(after)
            and before.dtype == after.dtype
            and before.shape == after.shape
        )

    def _number(self, term: _Term) -> int:
        return self._numbers.setdefault(term, len(self._numbers))

    def _lasts(self, node: GraphNode) -> bool:
        """Whether it draws random numbers or writes to what is there after the call."""
        return draws_random_numbers(node) or any(
            not isinstance(member, NodeRef)
            and (not isinstance(member, StateRef) or member.name in self._states.kept)
            for member in self._written(node)
        )

    def _writes_to_what_is_left(self, node: GraphNode) -> bool:
        """Whether a node of the second call writes to a value that the first one made."""
        members = self._written(node)
        kept = any(isinstance(m, StateRef) and m.name in self._states.kept for m in members)
        return not kept and any(isinstance(m, NodeRef) and m.index <= self._last for m in members)

    def _written(self, node: GraphNode) -> set[Reference]:
        roots = {self._aliases.find(reference) for reference in mutated_references(node)}
        return set().union(*(self._aliases.members[root] for root in roots))
