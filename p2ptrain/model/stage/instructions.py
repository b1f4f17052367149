"""Nodes bound to registers and to one batch size, ready to run one after the other.

Values live in numbered registers and are freed after their last use, so that memory is what plain
torch would take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.processor import HOST
from p2ptrain.errors import InternalError
from p2ptrain.model.graph.effects import written_leaves
from p2ptrain.model.graph.nodes import (
    Argument,
    BackwardGraph,
    GraphNode,
    InputRef,
    NodeRef,
    Reference,
    StateRef,
    TargetRef,
)
from p2ptrain.model.graph.operators import resolve
from p2ptrain.model.graph.values import Polynomial
from p2ptrain.model.stage.host_operators import where_right

Registers: TypeAlias = list[Any]

_Build: TypeAlias = Callable[[Registers], Any]

Sizes: TypeAlias = int | tuple[int, ...] | None
"""The batch size, or the batch size and the lengths; None where nothing that arrives shows them."""


@dataclass(frozen=True, slots=True)
class GraphInstruction:
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

    def run(self, registers: Registers) -> None:
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


class BoundBackward:
    """A backward for one batch size. May run in any thread, in several at once.

    Attributes:
        graph, batch: what it was made of.
    """

    def __init__(
        self,
        graph: BackwardGraph,
        batch: Sizes,
        computing: Callable[[GraphNode], Callable[..., Any]] | None = None,
        device: ComputeDevice = HOST,
    ) -> None:
        """`computing`: what computes a node, instead of its operator; `device`: as `bind`."""
        self.graph, self.batch = graph, batch
        nodes, call = graph.nodes, computing or partial(call_on, device)
        leaving = [gradient for gradient in graph.gradients if gradient is not None]
        self._gradients = graph.gradients
        self._registers = allocate(nodes, 0, [g for g in leaving if isinstance(g, InputRef)])
        self._written = written_leaves(nodes, 0)
        free = frees(nodes, 0, len(nodes), self._registers, leaving)
        self._instructions = [
            bind(
                *(node, index, self._registers, batch, free.get(index, ())),
                call=call(node),
                device=device,
            )
            for index, node in enumerate(nodes)
        ]

    def __call__(self, given: Sequence[Any]) -> list[Tensor | None]:
        """Its gradients.

        Args:
            given: the gradients that arrive, then what was kept; nothing is written to them.
        """
        registers: Registers = [None] * len(self._registers)
        for index, value in enumerate(given):
            register = self._registers.get(InputRef(index))
            if register is not None:
                written = InputRef(index) in self._written
                registers[register] = value.clone() if written else value
        for instruction in self._instructions:
            instruction.run(registers)
        return [None if g is None else registers[self._registers[g]] for g in self._gradients]


def call_of(node: GraphNode) -> Callable[..., Any]:
    """Its operator, without what torch puts around one."""
    call = resolve(node.operator).call
    return call._op if isinstance(call, OpOverload) else call


def call_on(device: ComputeDevice, node: GraphNode) -> Callable[..., Any]:
    """The same for a node on that device."""
    return where_right(node, device, call_of(node))


def bind(
    node: GraphNode,
    index: int,
    registers: Mapping[Reference, int],
    batch: Sizes,
    free: tuple[int, ...],
    *,
    call: Callable[..., Any] | None = None,
    weighs: bool = False,
    device: ComputeDevice = HOST,
) -> GraphInstruction:
    """The instruction of the node of that index.

    Args:
        registers: as `allocate` numbers them.
        batch: number of samples; None where it does not follow from what arrives.
        call: instead of the node's operator.
        device: where it runs: graphs name none.
    """
    constants: list[Any] = []
    holes: list[tuple[int, int]] = []
    built: list[tuple[int, _Build]] = []
    for position, argument in enumerate(node.args):
        constants.append(None)
        if isinstance(argument, InputRef | TargetRef | StateRef | NodeRef):
            holes.append((position, registers[argument]))
        elif _is_constant(argument):
            constants[position] = _constant(argument, batch, device)
        else:
            built.append((position, _builder(argument, registers, batch, device)))
    arguments = [(k, a) for k, a in node.kwargs if _is_constant(a)]
    fixed = {k: _constant(a, batch, device) for k, a in arguments}
    if not device.is_host and _makes_from_nothing(node):
        fixed["device"] = device.place
    dynamic = [
        (k, _builder(a, registers, batch, device)) for k, a in node.kwargs if not _is_constant(a)
    ]
    return GraphInstruction(
        call=call or call_on(device, node),
        args=constants,
        holes=tuple(holes),
        built=tuple(built),
        kwargs=fixed,
        built_kwargs=tuple(dynamic),
        result=registers[NodeRef(index)],
        free=free,
        grad_enabled=node.grad_enabled,
        weighs=weighs,
    )


def _makes_from_nothing(node: GraphNode) -> bool:
    """Whether it makes a tensor and gets none that says where."""
    overload = resolve(node.operator).overload
    if overload is None:
        return False
    arguments = overload._schema.arguments
    takes_tensors = any("Tensor" in str(argument.real_type) for argument in arguments)
    return not takes_tensors and any(argument.name == "device" for argument in arguments)


def _builder(
    argument: Argument, registers: Mapping[Reference, int], batch: Sizes, device: ComputeDevice
) -> _Build:
    """What makes an argument with values in it from the registers."""
    if isinstance(argument, tuple):
        parts = [_builder(item, registers, batch, device) for item in argument]
        return lambda values: [part(values) for part in parts]
    if isinstance(argument, InputRef | TargetRef | StateRef | NodeRef):
        register = registers[argument]
        return lambda values: values[register]
    constant = _constant(argument, batch, device)
    return lambda values: constant


def _is_constant(argument: Argument) -> bool:
    if isinstance(argument, tuple):
        return all(_is_constant(item) for item in argument)
    return not isinstance(argument, InputRef | TargetRef | StateRef | NodeRef)


def _constant(argument: Argument, batch: Sizes, device: ComputeDevice) -> Any:
    if isinstance(argument, tuple):
        return [_constant(item, batch, device) for item in argument]
    if isinstance(argument, torch.device):
        return device.place
    if isinstance(argument, BackwardGraph):
        return BoundBackward(argument, batch, device=device)
    if isinstance(argument, Polynomial):
        if batch is None:
            raise InternalError("the batch size does not follow from what this stage receives")
        return argument(*batch) if isinstance(batch, tuple) else argument(batch)
    return argument


def allocate(
    nodes: Sequence[GraphNode], start: int, entering: Iterable[Reference]
) -> dict[Reference, int]:
    """A register for everything that enters, is read or is made by nodes numbered from `start`."""
    registers: dict[Reference, int] = {}
    for value in entering:
        registers.setdefault(value, len(registers))
    for index, node in enumerate(nodes, start):
        for reference in node.references():
            registers.setdefault(reference, len(registers))
        registers[NodeRef(index)] = len(registers)
    return registers


def frees(
    nodes: Sequence[GraphNode],
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
