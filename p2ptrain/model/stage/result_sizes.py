"""What a graph of another device takes, known before anything of it runs.

A description of a few hundred bytes can ask for any memory and any time: `arange(2**31)`, an
expanded tensor that is copied, squares of squares. So its nodes run first on tensors that have
shapes and no memory (torch's device "meta"), down to the operators that they are made of, with
autograd: what is alive, what is kept for the backward, and how much arithmetic it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from p2ptrain.errors import Error, ProtocolError, TooLarge, size_text
from p2ptrain.model.graph.custom_operators import OWN_BACKWARD, own_backward
from p2ptrain.model.graph.description import Mode, ModelDescription, TensorDescription
from p2ptrain.model.graph.meta_common import COMMON, Unfit
from p2ptrain.model.graph.meta_rules import INDEXED, NODES, PARTS, UNKNOWN, Unknown, without_masks
from p2ptrain.model.graph.nodes import GraphNode, InputRef, NodeRef
from p2ptrain.model.graph.operators import resolve
from p2ptrain.model.graph.packed_sequences import CHECKED, noted_steps
from p2ptrain.model.graph.values import ValueDescription
from p2ptrain.model.stage.instructions import BoundBackward, allocate, bind
from p2ptrain.model.stage.memory_ledger import (
    MAX_BYTES,
    MAX_RESULTS,
    MemoryLedger,
    Needs,
    limit_bytes,
    storage_key,
)
from p2ptrain.model.stage.program import Program

MEASURED_WORK = 1e14
"""Of a whole forward that is run to measure it: hours of a small computer's."""

_MIN_BYTES = 64 << 20
"""What is run however little a device offers, so that planners can say what it lacks."""

_META = torch.device("meta")


def needs_of(
    description: ModelDescription, first: int, end: int, mode: Mode, batch: int
) -> list[Needs]:
    """By unit of [first, end).

    Raises:
        ProtocolError: the size of a result cannot be known.
        TooLarge: more than any device has.
        RuntimeError, IndexError, ValueError: torch refuses shapes. It names the node, and in a note
            the unit.
    """
    names = description.state_names(first, end)
    tensors = [description.tensors_by_name[name] for name in names]
    limit_bytes(sum(tensor.nbytes for tensor in tensors), "its weights")
    state = {tensor.name: _made(tensor) for tensor in tensors}
    ledger = MemoryLedger(storage_key(tensor) for tensor in state.values())
    program = _Dry(description, first, end, mode, state, ledger)
    sizes = (batch, *description.longest)
    inputs = [_arriving(value, sizes, first > 0) for value in description.crossing(first, mode)]
    used = description.target_uses(first, end, mode)
    targets = [_arriving(value, sizes, False) for value in description.targets] if used else []
    ledger.enter([*inputs, *targets])
    recording = torch.set_grad_enabled(mode == "train")
    hooks = torch.autograd.graph.saved_tensors_hooks(ledger.keep, ledger.kept)
    with recording, hooks, _ShapeMode(ledger), closing(ledger):
        program.run(inputs, targets, (0, 0, 0), before=ledger.begin)
    for unit in range(first, end):
        own = description.state_names(unit, unit + 1)
        needs = ledger.needs.setdefault(unit, Needs())
        needs.state_bytes = sum(description.tensors_by_name[name].nbytes for name in own)
    return [ledger.needs[unit] for unit in range(first, end)]


def shortest_packed(description: ModelDescription) -> int | None:
    """The fewest steps of what the training graph packs, where those differ; None where not.

    A captioning model packs an image and words, its loss the words alone, by the same lengths: made
    up as long as each can be, the two would have different numbers of rows.
    """
    if all(node.operator not in CHECKED for node in description.train.nodes):
        return None
    with noted_steps() as steps, suppress(Error, RuntimeError, IndexError, ValueError):
        needs_of(description, 0, len(description.units), "train", 2)
    return min(steps) if len(steps) > 1 else None


def node_needs(node: GraphNode, inputs: Sequence[Tensor]) -> Needs:
    """Of one node by itself, whose inputs are like these. Raises: as `needs_of`."""
    made = [_without_memory(tensor) for tensor in inputs]
    ledger = MemoryLedger(())
    ledger.enter(made)
    ledger.begin(0)
    registers = allocate([node], 0, [])
    values: list[Any] = [None] * len(registers)
    for reference, register in registers.items():
        if isinstance(reference, InputRef):
            values[register] = made[reference.index]
    instruction = bind(node, 0, registers, None, (), call=_computed(node, ledger))
    hooks = torch.autograd.graph.saved_tensors_hooks(ledger.keep, ledger.kept)
    with hooks, _ShapeMode(ledger), closing(ledger):
        instruction.run(values)
        ledger.made(0, values[instruction.result])
    return ledger.needs[0]


def _without_memory(tensor: Tensor) -> Tensor:
    size = (tensor.shape, tensor.stride())
    made = torch.empty_strided(*size, dtype=tensor.dtype, device=_META)
    return made.requires_grad_().clone() if tensor.requires_grad else made


def refuse_too_large(description: ModelDescription, batch: int, offered_bytes: int) -> None:
    """Do nothing where each unit by itself fits into that memory, with so many samples.

    It is measured with made-up weights, its gradients, and a backward.

    Raises:
        TooLarge: one does not, or would compute for hours; nothing of the model has run.
        ProtocolError: its sizes cannot be known.
        ValueError: torch refuses the shapes.
    """
    memory_bytes = max(offered_bytes, _MIN_BYTES)
    units = range(len(description.units))
    states = [_sizes_of_state(description, unit, unit + 1) for unit in units]
    for unit, sizes in zip(units, states, strict=True):
        drawn = sum(sizes) + 2 * max(sizes, default=0)
        _fit(f"layer {description.units[unit].name}", max(drawn, 2 * sum(sizes)), memory_bytes)
    needs = needs_of(description, 0, len(units), "train", batch)
    if sum(need.work for need in needs) > MEASURED_WORK:
        raise TooLarge("the model would be measured for hours, even with the fewest samples")
    kept_before = 0
    for unit, need in enumerate(needs):
        values = need.peak_bytes - kept_before
        kept_before += need.kept_bytes
        where = f"layer {description.units[unit].name} with {batch} samples"
        _fit(where, 2 * need.state_bytes + values, memory_bytes)


def stage_needs(
    description: ModelDescription, first: int, end: int, mode: Mode, batch: int
) -> Needs:
    """Of units [first, end) together. Raises as `needs_of`."""
    needs = needs_of(description, first, end, mode, batch)
    held = [description.tensors_by_name[name] for name in description.state_names(first, end)]
    return Needs(
        state_bytes=sum(tensor.nbytes for tensor in held),
        trainable_bytes=sum(tensor.nbytes for tensor in held if tensor.trainable),
        kept_bytes=sum(need.kept_bytes for need in needs),
        peak_bytes=max(need.peak_bytes for need in needs),
    )


def _sizes_of_state(description: ModelDescription, first: int, end: int) -> list[int]:
    by_name = description.tensors_by_name
    return [by_name[name].nbytes for name in description.state_names(first, end)]


def _fit(what: str, needed_bytes: int, memory_bytes: int) -> None:
    if needed_bytes > memory_bytes:
        raise TooLarge(
            f"the model does not fit: {what} needs {size_text(needed_bytes)}, and this device may "
            f"use {size_text(memory_bytes)}"
        )


def _made(tensor: TensorDescription) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.strides, dtype=tensor.dtype, device=_META)
    return nn.Parameter(made) if tensor.trainable else made


def _arriving(value: ValueDescription, sizes: Sequence[int], may_require_grad: bool) -> Tensor:
    shape = value.shape(*sizes)
    if min(shape, default=0) < 0 or value.nbytes(*sizes) > MAX_BYTES:
        raise ProtocolError(f"a model description was refused: {value.name} has no possible size")
    made = torch.empty(shape, dtype=value.dtype, device=_META)
    if may_require_grad and value.may_require_grad and made.is_floating_point():
        return made.requires_grad_().clone()
    return made


class _ShapeMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operator below autograd, and computes its shapes."""

    def __init__(self, ledger: MemoryLedger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would load its compiler for it: a second, and 100 MiB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _computed_part(func, args, kwargs or {})
        self._ledger.part(func, args, result)
        return result


def _computed_part(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if (common := COMMON.get(func)) is not None:
        with suppress(Unfit):
            return common(*args, **kwargs)
    if (rule := PARTS.get(func)) is not None:
        return rule(*args, **kwargs)
    if func in INDEXED:
        args = (args[0], without_masks(args[0], args[1]), *args[2:])
    _refuse_many(func, args)
    if _takes_device(func):
        return func(*args, **{**kwargs, "device": _META})
    return func(*args, **kwargs)


class _Dry(Program):
    """A program whose values have no memory."""

    def __init__(
        self,
        description: ModelDescription,
        first: int,
        end: int,
        mode: Mode,
        state: Mapping[str, Tensor],
        ledger: MemoryLedger,
    ) -> None:
        super().__init__(description, first, end, mode, state)
        self._ledger = ledger

    def _call(self, index: int) -> Callable[..., Any]:
        compute = _computed(self._nodes[index], self._ledger)
        register, freed = self._registers[NodeRef(index)], self._free.get(index, ())

        def call(*args: Any, **kwargs: Any) -> Any:
            result = compute(*args, **kwargs)
            self._ledger.made(register, result)
            self._ledger.free(freed)
            return result

        return call


def _computed(node: GraphNode, ledger: MemoryLedger) -> Callable[..., Any]:
    """What gives the shapes of a node's results, and says which node it was where it cannot."""
    compute = _shapes(node, ledger)

    def call(*args: Any, **kwargs: Any) -> Any:
        ledger.node()
        try:
            return compute(*args, **kwargs)
        except (ProtocolError, TooLarge) as error:
            raise type(error)(f"a model description was refused: {_named(node)}: {error}") from None
        except NotImplementedError as error:
            raise ProtocolError(
                f"a model description was refused: {_named(node)}: the size of its result is not "
                "known before it runs"
            ) from error
        except Exception as error:  # whatever torch raises
            raise ValueError(f"{_named(node)}: {_first_line(error)}") from error

    return call


def _shapes(node: GraphNode, ledger: MemoryLedger) -> Callable[..., Any]:
    operator, rule = resolve(node.operator), NODES.get(node.operator)
    if node.operator == OWN_BACKWARD:
        return partial(_own_backward, ledger)
    if rule is not None:
        return partial(_known_numbers, node, partial(rule, ledger.charge))
    if operator.overload is None:
        return partial(_arithmetic, operator.call)
    return partial(_known_numbers, node, operator.overload._op)


def _own_backward(
    ledger: MemoryLedger,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    kept: Sequence[Any],
    backward: BoundBackward,
) -> list[Tensor]:
    dry = BoundBackward(backward.graph, backward.batch, lambda node: _computed(node, ledger))
    with torch.no_grad():
        dry([*(torch.empty_like(output) for output in outputs), *kept])
    return own_backward(outputs, inputs, kept, dry)


def _arithmetic(call: Callable[..., Any], *args: Any) -> Any:
    return UNKNOWN if any(map(_is_unknown, args)) else call(*args)


def _known_numbers(node: GraphNode, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """With a number in the place of an unknown one, unless it is a size; and without devices."""
    names = resolve(node.operator).schema_arguments
    given = [_known(value, name, node) for name, value in zip(names, args, strict=False)]
    named = {name: _known(value, name, node) for name, value in kwargs.items()}
    return call(*given, **named)


def _known(value: Any, name: str, node: GraphNode) -> Any:
    if isinstance(value, torch.device):
        return _META
    if isinstance(value, list):
        return [_known(item, name, node) for item in value]
    if not isinstance(value, Unknown):
        return value
    types = resolve(node.operator).types
    if types is None or types.is_whole(name):
        raise ProtocolError("a size depends on numbers that are not known before it runs")
    return 1


def _is_unknown(value: Any) -> bool:
    return isinstance(value, Unknown)


def _named(node: GraphNode) -> str:
    return f"{node.name[:40]} ({node.operator[:60]})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@cache
def _takes_device(func: OpOverload) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


_MANY = frozenset({"unbind.int", "split.Tensor", "unsafe_split.Tensor", "split_copy.Tensor"})


def _refuse_many(func: OpOverload, args: Sequence[Any]) -> None:
    """Views are counted before they are made: each takes more memory than what it shows."""
    name = func._schema.name.removeprefix("aten::") + "." + func._overloadname
    if name not in _MANY or not args or not args[0].dim():
        return
    size = 1 if name == "unbind.int" else max(args[1], 1)
    dims = args[1:] if name == "unbind.int" else args[2:]
    if args[0].shape[dims[0] if dims else 0] > size * MAX_RESULTS:
        raise TooLarge(f"it gives more than {MAX_RESULTS} results")
