"""A range of a graph's nodes, prepared to be run again and again.

A small interpreter instead of generated code: names from another device never become Python. Values
live in numbered registers and are freed after their last use, so that memory is what plain torch
would take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from p2ptrain.errors import InternalError
from p2ptrain.model.description import Mode, ModelDescription
from p2ptrain.model.effects import aliased_references, draws_random_numbers, mutated_references
from p2ptrain.model.graph import (
    Argument,
    InputRef,
    Node,
    NodeRef,
    Reference,
    StateRef,
    TargetRef,
)
from p2ptrain.model.operators import resolve
from p2ptrain.model.randomness import seeded
from p2ptrain.model.rewritten import hidden
from p2ptrain.model.row_gradients import EMBEDDING, embedding
from p2ptrain.model.values import Polynomial
from p2ptrain.model.written import state_views

Seed: TypeAlias = tuple[int, int, int]
"""(the job's seed, step, micro-batch)."""
Watch: TypeAlias = Callable[[Tensor], None]
Before: TypeAlias = Callable[[int], None]
_Registers: TypeAlias = list[Any]
_Build: TypeAlias = Callable[[_Registers], Any]

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

_BATCHES_KEPT = 8
"""Batch sizes for which instructions are kept: a micro-batch, a ragged one, those of a profile."""


@dataclass(frozen=True, slots=True)
class _Instruction:
    """One node, ready to run.

    Attributes:
        call: the operator.
        args: its positional arguments, with holes.
        holes: (position, register) of the holes that a register fills.
        built: (position, builder) of lists that hold values.
        kwargs, built_kwargs: the same by name.
        result: register for what it gives.
        free: registers that nothing reads any more afterwards.
        grad_enabled: whether autograd records it.
        weighs: whether it is a product with a parameter that takes gradients.
    """

    call: Callable[..., Any]
    args: list[Any]
    holes: tuple[tuple[int, int], ...]
    built: tuple[tuple[int, _Build], ...]
    kwargs: dict[str, Any]
    built_kwargs: tuple[tuple[str, _Build], ...]
    result: int
    free: tuple[int, ...]
    grad_enabled: bool
    weighs: bool

    def run(self, registers: _Registers) -> None:
        """Read registers, call, write one, free some."""
        args = self.args.copy()
        for position, register in self.holes:
            args[position] = registers[register]
        for position, build in self.built:
            args[position] = build(registers)
        kwargs = self.kwargs
        if self.built_kwargs:
            kwargs = kwargs | {name: build(registers) for name, build in self.built_kwargs}
        registers[self.result] = self.call(*args, **kwargs)
        for register in self.free:
            registers[register] = None


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
        separate: Collection[str] = (),
        hiding: Collection[str] = (),
    ) -> None:
        """Prepare them.

        Args:
            separate: parameters whose gradients are taken from `.grad` between two updates.
            hiding: tensors of the state to which nodes write unnoticed by autograd (`rewritten`).
        """
        self._separate = separate
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
        self._registers = _allocate(self._nodes[start:stop], start, self._entering, state)
        self._initial: _Registers = [None] * len(self._registers)
        for reference, register in self._registers.items():
            if isinstance(reference, StateRef):
                self._initial[register] = state[reference.name]
        self._free = _frees(self._nodes, start, stop, self._registers, self._leaving)
        self._written = _written_leaves(self._nodes[start:stop], start)
        self._hidden = _writes_to(frozenset(hiding), self._nodes, start, stop)
        self._bound: dict[int | None, list[tuple[_UnitNodes, list[_Instruction]]]] = {}

    def run(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        seed: Seed,
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
            seed: for the units that draw random numbers.
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
                with nullcontext() if unit.random is None else seeded(seed, unit.random):
                    _execute(instructions, registers, recording, watch)
            except Exception as error:
                error.add_note(self._names[unit.unit])
                raise
        return [registers[self._registers[value]] for value in self._leaving]

    def _enter(
        self, registers: _Registers, inputs: Sequence[Tensor], targets: Sequence[Tensor]
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

    def _batch(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> int | None:
        described = [*zip(self.inputs, inputs, strict=True)]
        described += zip(self._targets, targets, strict=False)
        sizes = (value.batch_of(tuple(tensor.shape)) for value, tensor in described)
        return next((size for size in sizes if size is not None), None)

    def _instructions(self, batch: int | None) -> list[tuple[_UnitNodes, list[_Instruction]]]:
        if batch not in self._bound:
            if len(self._bound) >= _BATCHES_KEPT:
                del self._bound[next(iter(self._bound))]
            self._bound[batch] = [
                (unit, [self._instruction(k, batch) for k in range(unit.first, unit.end)])
                for unit in self._units
            ]
        return self._bound[batch]

    def _instruction(self, index: int, batch: int | None) -> _Instruction:
        node = self._nodes[index]
        constants: list[Any] = []
        holes: list[tuple[int, int]] = []
        built: list[tuple[int, _Build]] = []
        for position, argument in enumerate(node.args):
            constants.append(None)
            if isinstance(argument, InputRef | TargetRef | StateRef | NodeRef):
                holes.append((position, self._registers[argument]))
            elif _is_constant(argument):
                constants[position] = _constant(argument, batch)
            else:
                built.append((position, self._builder(argument, batch)))
        fixed = {k: _constant(a, batch) for k, a in node.kwargs if _is_constant(a)}
        dynamic = [(k, self._builder(a, batch)) for k, a in node.kwargs if not _is_constant(a)]
        call = embedding if self._adds_rows(node) else resolve(node.operator).call
        call = call._op if isinstance(call, OpOverload) else call
        for position in self._hidden.get(index, ()):
            call = hidden(call, position)
        return _Instruction(
            call=call,
            args=constants,
            holes=tuple(holes),
            built=tuple(built),
            kwargs=fixed,
            built_kwargs=tuple(dynamic),
            result=self._registers[NodeRef(index)],
            free=self._free.get(index, ()),
            grad_enabled=node.grad_enabled,
            weighs=self._weighs(node),
        )

    def _adds_rows(self, node: Node) -> bool:
        """Whether it reads a table that takes gradients, and is all that does."""
        if node.operator != EMBEDDING or not node.args:
            return False
        table = node.args[0]
        return (
            isinstance(table, StateRef)
            and self.parameter_uses.get(table.name) == 1
            and table.name not in self._separate
        )

    def _weighs(self, node: Node) -> bool:
        position = _PRODUCTS.get(node.operator)
        if position is None or position >= len(node.args):
            return False
        weight = node.args[position]
        return isinstance(weight, StateRef) and weight.name in self.parameter_uses

    def _builder(self, argument: Argument, batch: int | None) -> _Build:
        """What makes an argument with values in it from the registers."""
        if isinstance(argument, tuple):
            parts = [self._builder(item, batch) for item in argument]
            return lambda registers: [part(registers) for part in parts]
        if isinstance(argument, InputRef | TargetRef | StateRef | NodeRef):
            register = self._registers[argument]
            return lambda registers: registers[register]
        constant = _constant(argument, batch)
        return lambda registers: constant


def _execute(
    instructions: Iterable[_Instruction],
    registers: _Registers,
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


def _is_constant(argument: Argument) -> bool:
    if isinstance(argument, tuple):
        return all(_is_constant(item) for item in argument)
    return not isinstance(argument, InputRef | TargetRef | StateRef | NodeRef)


def _constant(argument: Argument, batch: int | None) -> Any:
    if isinstance(argument, tuple):
        return [_constant(item, batch) for item in argument]
    if isinstance(argument, Polynomial):
        if batch is None:
            raise InternalError("the batch size does not follow from what this stage receives")
        return argument(batch)
    return argument


def _parameter_uses(nodes: Iterable[Node], state: Mapping[str, Tensor]) -> Mapping[str, int]:
    read = [r.name for node in nodes for r in node.references() if isinstance(r, StateRef)]
    return Counter(name for name in read if name in state and state[name].requires_grad)


def _unit_nodes(nodes: Sequence[Node], unit: int, first: int, end: int) -> _UnitNodes:
    random = (k for k, n in enumerate(nodes[first:end], first) if draws_random_numbers(n))
    return _UnitNodes(unit, first, end, next(random, None))


def _allocate(
    nodes: Sequence[Node],
    start: int,
    entering: Iterable[InputRef | NodeRef],
    state: Mapping[str, Tensor],
) -> dict[Reference, int]:
    """A register for everything that enters, is read or is made."""
    registers: dict[Reference, int] = {}
    for value in entering:
        registers.setdefault(value, len(registers))
    for index, node in enumerate(nodes, start):
        for reference in node.references():
            if isinstance(reference, StateRef) and reference.name not in state:
                raise InternalError(f"tensor {reference.name!r} of this stage is missing")
            registers.setdefault(reference, len(registers))
        registers[NodeRef(index)] = len(registers)
    return registers


def _frees(
    nodes: Sequence[Node],
    start: int,
    stop: int,
    registers: Mapping[Reference, int],
    leaving: Iterable[InputRef | NodeRef],
) -> dict[int, tuple[int, ...]]:
    """Node -> registers that nothing reads after it."""
    last: dict[Reference, int] = {}
    for index in range(start, stop):
        last[NodeRef(index)] = index
        last.update(dict.fromkeys(nodes[index].references(), index))
    for value in leaving:
        last.pop(value, None)
    free: dict[int, list[int]] = {}
    for reference, index in last.items():
        if not isinstance(reference, StateRef):
            free.setdefault(index, []).append(registers[reference])
    return {index: tuple(freed) for index, freed in free.items()}


def _writes_to(
    names: frozenset[str], nodes: Sequence[Node], start: int, stop: int
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


def _written_leaves(nodes: Sequence[Node], start: int) -> frozenset[Reference]:
    """Leaves of the batch that some node writes to, directly or through a view."""
    source: dict[Reference, set[Reference]] = {}
    written: set[Reference] = set()

    def leaves(reference: Reference) -> set[Reference]:
        if isinstance(reference, InputRef | TargetRef):
            return {reference}
        return source.get(reference, set())

    for index, node in enumerate(nodes, start):
        for reference in mutated_references(node):
            written |= leaves(reference)
        source[NodeRef(index)] = set().union(*map(leaves, aliased_references(node)))
    return frozenset(written)
