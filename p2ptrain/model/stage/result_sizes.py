"""What a graph of another device takes, known before anything of it runs.

A description of a few hundred bytes can ask for any memory and any time: `arange(2**31)`, an
expanded tensor that is copied, squares of squares. So its nodes run first on tensors that have
shapes and no memory (torch's device "meta"), down to the operators that they are made of, with
autograd: what is alive, what is kept for the backward, and how much arithmetic it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
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
from p2ptrain.model.stage.program import Program

MAX_WORK = 1e16
"""Arithmetic of one unit's forward: months of a small computer's."""

MEASURED_WORK = 1e14
"""Of a whole forward that is run to measure it: hours of a small computer's."""

_ELEMENT_WORK = 16.0
"""Of reading or writing one element, in multiplications: memory is slower."""

_MAX_PARTS = 1 << 16
"""Results of all operators that one graph is made of: each takes some 50 microseconds here."""

_MAX_RESULTS = 1 << 13
"""The same of one node, which may give as many views."""

_MAX_BYTES = 1 << 50

_MIN_BYTES = 64 << 20
"""What is run however little a device offers, so that planners can say what it lacks."""

_META = torch.device("meta")


@dataclass(slots=True)
class Needs:
    """What one unit takes for one micro-batch.

    Attributes:
        state_bytes: parameters, buffers and constants.
        kept_bytes: for its backward.
        peak_bytes: values alive at the worst moment of its forward, with all that is kept until
            then, by units before it too.
        work: operations of its forward.
    """

    state_bytes: int = 0
    kept_bytes: int = 0
    peak_bytes: int = 0
    work: float = 0.0


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
    _limit(sum(tensor.nbytes for tensor in tensors), "its weights")
    state = {tensor.name: _made(tensor) for tensor in tensors}
    ledger = _Ledger(_storage(tensor) for tensor in state.values())
    program = _Dry(description, first, end, mode, state, ledger)
    inputs = [_arriving(value, batch, first > 0) for value in description.crossing(first, mode)]
    used = description.target_uses(first, end, mode)
    targets = [_arriving(value, batch, False) for value in description.targets] if used else []
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
    ledger = _Ledger(())
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


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """What a stage takes for one micro-batch: as `Needs`, of all its units together.

    Attributes:
        trainable_bytes: of `state_bytes`, what an optimizer changes.
    """

    state_bytes: int
    trainable_bytes: int
    kept_bytes: int
    peak_bytes: int


def stage_needs(
    description: ModelDescription, first: int, end: int, mode: Mode, batch: int
) -> StageNeeds:
    """Of units [first, end). Raises as `needs_of`."""
    needs = needs_of(description, first, end, mode, batch)
    held = [description.tensors_by_name[name] for name in description.state_names(first, end)]
    return StageNeeds(
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


def _limit(size_bytes: int, what: str) -> None:
    if size_bytes > _MAX_BYTES:
        raise TooLarge(f"the model fits no device: {what} needs more than {size_text(_MAX_BYTES)}")


def _made(tensor: TensorDescription) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.strides, dtype=tensor.dtype, device=_META)
    return nn.Parameter(made) if tensor.trainable else made


def _arriving(value: ValueDescription, batch: int, may_require_grad: bool) -> Tensor:
    shape = value.shape(batch)
    if min(shape, default=0) < 0 or value.nbytes(batch) > _MAX_BYTES:
        raise ProtocolError(f"a model description was refused: {value.name} has no possible size")
    made = torch.empty(shape, dtype=value.dtype, device=_META)
    if may_require_grad and value.may_require_grad and made.is_floating_point():
        return made.requires_grad_().clone()
    return made


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


@dataclass(slots=True)
class _Ledger:
    """Counts what is alive, by storage."""

    state: Iterable[int]
    needs: dict[int, Needs] = field(default_factory=dict)
    _unit: Needs = field(default_factory=Needs)
    _own: set[int] = field(default_factory=set)
    _users: dict[int, int] = field(default_factory=dict)
    _values: dict[int, list[Tensor]] = field(default_factory=dict)
    _kept: dict[int, Tensor] = field(default_factory=dict)
    _saved: list[Tensor] = field(default_factory=list)
    _alive_bytes: int = 0
    _new_bytes: int = 0
    _parts: int = 0
    _parts_before: int = 0

    def __post_init__(self) -> None:
        self._own = set(self.state)

    def close(self) -> None:
        """Hold no tensor: autograd's hooks hold this, which no collector sees."""
        self._values.clear()
        self._kept.clear()
        self._saved.clear()

    def enter(self, tensors: Iterable[Tensor]) -> None:
        """What arrives stays until the end."""
        self.made(-1, list(tensors))

    def begin(self, unit: int) -> None:
        """Nodes of that unit come."""
        self._unit = self.needs[unit] = Needs(peak_bytes=self._alive_bytes)

    def node(self) -> None:
        """One is about to be computed."""
        self._parts_before = self._parts

    def part(self, func: Any, given: Any, result: Any) -> None:
        """An operator that a node is made of has been computed."""
        read = sum(map(_extent, _tensors(given)))
        made = list(_tensors(result))
        self._parts += max(len(made), 1)
        if self._parts > min(_MAX_PARTS, self._parts_before + _MAX_RESULTS):
            raise TooLarge("it is made of too many operators")
        elements = sum(map(_extent, made))
        self._new_bytes += sum(t.untyped_storage().nbytes() for t in made)
        _limit(self._new_bytes, "a value")
        self.charge(_ELEMENT_WORK * (elements + read) + _multiplications(func, given, elements))

    def charge(self, work: float) -> None:
        """So much is computed."""
        self._unit.work += work
        if self._unit.work > MAX_WORK:
            raise TooLarge("it would compute for weeks")

    def keep(self, tensor: Tensor) -> int:
        """Autograd keeps it for the backward, by this number: a result would hold itself."""
        key = _storage(tensor)
        if key not in self._own and key not in self._kept:
            self._kept[key] = tensor
            self._unit.kept_bytes += tensor.untyped_storage().nbytes()
            self._use(tensor)
        self._saved.append(tensor)
        return len(self._saved) - 1

    def kept(self, number: int) -> Tensor:
        """What `keep` was given."""
        return self._saved[number]

    def made(self, register: int, result: Any) -> None:
        """A node has given that."""
        self._unit.peak_bytes = max(self._unit.peak_bytes, self._alive_bytes + self._new_bytes)
        self._new_bytes = 0
        self._values[register] = list(_tensors(result))
        for tensor in self._values[register]:
            self._use(tensor)
        self._unit.peak_bytes = max(self._unit.peak_bytes, self._alive_bytes)

    def free(self, registers: Iterable[int]) -> None:
        """Nothing reads these any more."""
        for register in registers:
            for tensor in self._values.pop(register, ()):
                key = _storage(tensor)
                self._users[key] -= 1
                if not self._users[key]:
                    del self._users[key]
                    if key not in self._own:
                        self._alive_bytes -= tensor.untyped_storage().nbytes()

    def _use(self, tensor: Tensor) -> None:
        key = _storage(tensor)
        if key not in self._users and key not in self._own:
            self._alive_bytes += tensor.untyped_storage().nbytes()
        self._users[key] = self._users.get(key, 0) + 1


class _ShapeMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operator below autograd, and computes its shapes."""

    def __init__(self, ledger: _Ledger) -> None:
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
        ledger: _Ledger,
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


def _computed(node: GraphNode, ledger: _Ledger) -> Callable[..., Any]:
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


def _shapes(node: GraphNode, ledger: _Ledger) -> Callable[..., Any]:
    operator, rule = resolve(node.operator), NODES.get(node.operator)
    if node.operator == OWN_BACKWARD:
        return partial(_own_backward, ledger)
    if rule is not None:
        return partial(_known_numbers, node, partial(rule, ledger.charge))
    if operator.overload is None:
        return partial(_arithmetic, operator.call)
    return partial(_known_numbers, node, operator.overload._op)


def _own_backward(
    ledger: _Ledger,
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


def _extent(tensor: Tensor) -> int:
    """Its elements; where one side is 0, kernels go along the others all the same."""
    return tensor.numel() or math.prod(max(size, 1) for size in tensor.shape)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


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
    if args[0].shape[dims[0] if dims else 0] > size * _MAX_RESULTS:
        raise TooLarge(f"it gives more than {_MAX_RESULTS} results")


_INNER = {
    "mm": 0,
    "bmm": 0,
    "mv": 0,
    "dot": 0,
    "matmul": 0,
    "linear": 0,
    "addmm": 1,
    "addmv": 1,
    "addbmm": 1,
    "baddbmm": 1,
}
"""Products -> the argument whose last dimension is summed over."""

_CUBIC = re.compile(
    r"_?linalg|svd|qr$|cholesky|lu_|lu$|triangular|orgqr|ormqr|matrix_exp|inverse|eig|geqrf|ldl"
)


def _multiplications(func: OpOverload, args: Sequence[Any], elements: int) -> float:
    """Of an operator that does more than one for each element."""
    name = func._schema.name.removeprefix("aten::")
    place = _INNER.get(name)
    if place is not None and args[place].dim():
        return 2.0 * elements * int(args[place].shape[-1])
    if "convolution" in name and len(args) > 6:
        weight: Tensor = args[1]
        per_channel = weight.numel() / max(weight.shape[0], 1)
        return 2.0 * (args[0].numel() if args[6] else elements) * per_channel
    if _CUBIC.match(name):
        given = list(_tensors(args))
        return 30.0 * sum(t.numel() * max(t.shape[-2:], default=1) for t in given)
    return 0.0
