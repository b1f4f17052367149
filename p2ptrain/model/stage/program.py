"""A range of a graph's nodes, prepared to be run again and again.

A small interpreter (`instructions`) instead of generated code: names from another device never
become Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.processor import HOST
from p2ptrain.errors import InternalError
from p2ptrain.model.graph.description import Mode, ModelDescription
from p2ptrain.model.graph.effects import draws_random_numbers, mutated_references, written_leaves
from p2ptrain.model.graph.nodes import GraphNode, NodeRef, Reference, StateRef, TargetRef
from p2ptrain.model.graph.values import sizes_of
from p2ptrain.model.stage.embedding_rows import EMBEDDING, embedding
from p2ptrain.model.stage.instructions import (
    GraphInstruction,
    Registers,
    Sizes,
    allocate,
    bind,
    call_on,
    frees,
)
from p2ptrain.model.stage.mutated_state import hidden, state_views
from p2ptrain.model.stage.random_operators import drawing_call, seeded

Seed: TypeAlias = tuple[int, int, int]
"""(the job's seed, step, micro-batch)."""

Watch: TypeAlias = Callable[[Tensor], None]

Before: TypeAlias = Callable[[int], None]

_PRODUCTS = {
    f"aten.{name}": 2 if name == "addmm.default" else 1
    for name in (
        *("linear.default", "addmm.default", "mm.default", "matmul.default"),
        *(f"conv{d}d.{overload}" for d in (1, 2, 3) for overload in ("default", "padding")),
        *("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input"),
        "convolution.default",
    )
}
"""Operators that are a product of their input and a weight -> the weight's position.

See `split_backward`. Where the weight is what a node has made of a parameter (turned over), other
nodes may use that too.
"""

_BATCHES_KEPT = 32
"""Batch sizes and lengths for which instructions are kept: of micro-batches, and of a profile."""


class Passing(Protocol):
    """Receives how far a forward has come, in its thread."""

    def unit(self, number: int) -> None:
        """That unit of the model is about to run."""

    def end(self) -> None:
        """The last one has run; nothing is added to running statistics yet."""


@dataclass(frozen=True, slots=True)
class _UnitNodes:
    """The part of one unit: nodes [first, end), and the first that draws random numbers."""

    unit: int
    first: int
    end: int
    random: int | None


class Program:
    """Units [first, end) of one graph with their state, ready to run.

    Attributes:
        inputs, outputs: what crosses into the first unit and out of the last.
        parameter_uses: name of each parameter that takes gradients -> how often nodes read it.
    """

    def __init__(
        self,
        description: ModelDescription,
        first: int,
        end: int,
        mode: Mode,
        state: Mapping[str, Tensor],
        tied: Collection[str] = (),
        hiding: Collection[str] = (),
        device: ComputeDevice = HOST,
        hashes: bool = False,
    ) -> None:
        """Prepare them.

        Args:
            tied: parameters in whose place others are read (`instead`), no leaves.
            hiding: tensors of the state to which nodes write unnoticed by autograd (`rewritten`).
            device: where they run, and `state` is.
            hashes: masks of dropout are hashed (`random_operators`).
        """
        self._device = device
        self._hashes = hashes
        self._tied = tied
        self._lengths = len(description.longest)
        self._names = [unit.name for unit in description.units]
        self.inputs = description.crossing(first, mode)
        self.outputs = description.crossing(end, mode)
        self._targets = description.targets
        self._entering = description.crossing_values(first, mode)
        self._leaving = description.crossing_values(end, mode)
        self._nodes = description.graph(mode).nodes
        start, stop = description.node_range(first, end, mode)
        self.parameter_uses = _parameter_uses(self._nodes[start:stop], state)
        self._units = [
            _unit_nodes(self._nodes, u, *description.units[u].nodes(mode))
            for u in range(first, end)
        ]
        _refuse_missing(self._nodes[start:stop], state)
        self._registers = allocate(self._nodes[start:stop], start, self._entering)
        self._initial: Registers = [None] * len(self._registers)
        for reference, register in self._registers.items():
            if isinstance(reference, StateRef):
                self._initial[register] = state[reference.name]
        self._free = frees(self._nodes, start, stop, self._registers, self._leaving)
        self._written = written_leaves(self._nodes[start:stop], start)
        self._hidden = _writes_to(frozenset(hiding), self._nodes, start, stop)
        self._bound: dict[Sizes, list[tuple[_UnitNodes, list[GraphInstruction]]]] = {}

    def run(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        seed: Seed | None,
        *,
        watch: Watch | None = None,
        instead: Mapping[str, Tensor] | None = None,
        before: Before | None = None,
    ) -> list[Tensor]:
        """Run all nodes under the caller's autograd mode.

        What an operator raises gets the name of its unit as a note.

        Args:
            inputs: as `crossing` of the first unit lists them.
            targets: all leaves of the target, or none where no unit uses any.
            seed: for the units that draw random numbers; None: the generator is the caller's.
            watch: called with the result of each product with a parameter that takes gradients.
            instead: tensors by name, read in place of those of the state.
            before: called with the number of each unit before it runs.
        """
        registers = self._initial.copy()
        for name, tensor in (instead or {}).items():
            register = self._registers.get(StateRef(name))
            if register is not None:
                registers[register] = tensor
        self._enter(registers, inputs, targets)
        recording = torch.is_grad_enabled()
        for unit, instructions in self._instructions(self._batch(inputs, targets)):
            if before is not None:
                before(unit.unit)
            try:
                with _seeded(seed, unit.random):
                    _execute(instructions, registers, recording, watch)
            except Exception as error:
                error.add_note(self._names[unit.unit])
                raise
        return [registers[self._registers[value]] for value in self._leaving]

    def _enter(
        self, registers: Registers, inputs: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> None:
        for reference, value in zip(self._entering, inputs, strict=True):
            registers[self._registers[reference]] = self._private(reference, value)
        for index, value in enumerate(targets):
            target = TargetRef(index)
            if target in self._registers:
                registers[self._registers[target]] = self._private(target, value)

    def _private(self, reference: Reference, value: Tensor) -> Tensor:
        """A leaf of the batch that is written to is copied: others may still need it."""
        return value.clone() if reference in self._written else value

    def _batch(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Sizes:
        described = [*zip(self.inputs, inputs, strict=True)]
        described += zip(self._targets, targets, strict=False)
        shapes = ((value, tuple(tensor.shape)) for value, tensor in described)
        if not self._lengths:
            sizes = (value.batch_of(shape) for value, shape in shapes)
            return next((size for size in sizes if size is not None), None)
        known = sizes_of(shapes, self._lengths)
        return tuple(size or 0 for size in known)  # what nothing shows, nothing here needs

    def _instructions(self, batch: Sizes) -> list[tuple[_UnitNodes, list[GraphInstruction]]]:
        if batch not in self._bound:
            if len(self._bound) >= _BATCHES_KEPT:
                del self._bound[next(iter(self._bound))]
            self._bound[batch] = [
                (unit, [self._instruction(k, batch) for k in range(unit.first, unit.end)])
                for unit in self._units
            ]
        return self._bound[batch]

    def _instruction(self, index: int, batch: Sizes) -> GraphInstruction:
        node = self._nodes[index]
        call = self._call(index)
        for position in self._hidden.get(index, ()):
            call = hidden(call, position)
        free = self._free.get(index, ())
        weighs = self._weighs(node)
        return bind(
            *(node, index, self._registers, batch, free),
            call=call,
            weighs=weighs,
            device=self._device,
        )

    def _call(self, index: int) -> Callable[..., Any]:
        """What computes the node of that index."""
        node = self._nodes[index]
        drawing = drawing_call(node, self._device, hashes=self._hashes)
        if drawing is not None:
            return drawing
        adds_rows = self._device.is_host and self._adds_rows(node)
        return embedding if adds_rows else call_on(self._device, node)

    def _adds_rows(self, node: GraphNode) -> bool:
        """Whether it reads a table that takes gradients, and is all that does."""
        if node.operator != EMBEDDING or not node.args:
            return False
        table = node.args[0]
        return (
            isinstance(table, StateRef)
            and self.parameter_uses.get(table.name) == 1
            and table.name not in self._tied
        )

    def _weighs(self, node: GraphNode) -> bool:
        position = _PRODUCTS.get(node.operator)
        if position is None or position >= len(node.args):
            return False
        weight = node.args[position]
        return isinstance(weight, StateRef) and weight.name in self.parameter_uses


def _seeded(seed: Seed | None, node: int | None) -> AbstractContextManager[None]:
    return nullcontext() if seed is None or node is None else seeded(seed, node)


def _execute(
    instructions: Iterable[GraphInstruction],
    registers: Registers,
    recording: bool,
    watch: Watch | None,
) -> None:
    """Run instructions, switching autograd's recording off where the user did."""
    switched = False
    try:
        for instruction in instructions:
            if recording and instruction.grad_enabled is switched:
                switched = not instruction.grad_enabled
                torch.set_grad_enabled(instruction.grad_enabled)
            instruction.run(registers)
            if watch is not None and instruction.weighs:
                watch(registers[instruction.result])
    finally:
        if switched:
            torch.set_grad_enabled(True)


def _parameter_uses(nodes: Iterable[GraphNode], state: Mapping[str, Tensor]) -> Mapping[str, int]:
    read = [r.name for node in nodes for r in node.references() if isinstance(r, StateRef)]
    return Counter(name for name in read if name in state and state[name].requires_grad)


def _unit_nodes(nodes: Sequence[GraphNode], unit: int, first: int, end: int) -> _UnitNodes:
    random = (k for k, n in enumerate(nodes[first:end], first) if draws_random_numbers(n))
    return _UnitNodes(unit, first, end, next(random, None))


def _refuse_missing(nodes: Iterable[GraphNode], state: Mapping[str, Tensor]) -> None:
    read = (reference for node in nodes for reference in node.references())
    for reference in read:
        if isinstance(reference, StateRef) and reference.name not in state:
            raise InternalError(f"tensor {reference.name!r} of this stage is missing")


def _writes_to(
    names: frozenset[str], nodes: Sequence[GraphNode], start: int, stop: int
) -> dict[int, list[int]]:
    """Node -> positions of its arguments through which it writes to one of these tensors."""
    if not names:
        return {}
    views = state_views(nodes, start, stop)
    found: dict[int, list[int]] = {}
    for index in range(start, stop):
        written = mutated_references(nodes[index])
        for position, argument in enumerate(nodes[index].args):
            if (
                isinstance(argument, StateRef | NodeRef)
                and argument in written
                and names & views.get(argument, frozenset())
            ):
                found.setdefault(index, []).append(position)
    return found
