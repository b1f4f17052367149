"""What is alive, kept and computed while a graph runs on tensors without memory.

`result_sizes` runs the graph; here its values are counted by storage, so that views cost nothing,
and its arithmetic by operator. Limits end it early.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from p2ptrain.errors import TooLarge, size_text

MAX_WORK = 1e16
"""Arithmetic of one unit's forward: months of a small computer's."""

_ELEMENT_WORK = 16.0
"""Of reading or writing one element, in multiplications: memory is slower."""

_MAX_PARTS = 1 << 16
"""Results of all operators that one graph is made of: each takes some 50 microseconds here."""

MAX_RESULTS = 1 << 13
"""The same of one node, which may give as many views."""

MAX_BYTES = 1 << 50


@dataclass(slots=True)
class Needs:
    """What one unit, or the units of a stage together, take for one micro-batch.

    Attributes:
        state_bytes: parameters, buffers and constants.
        trainable_bytes: of these, what an optimizer changes; of a stage alone.
        kept_bytes: for its backward.
        peak_bytes: values alive at the worst moment of its forward, with all that is kept until
            then, by units before it too.
        work: operations of its forward.
    """

    state_bytes: int = 0
    kept_bytes: int = 0
    peak_bytes: int = 0
    work: float = 0.0
    trainable_bytes: int = 0


@dataclass(slots=True)
class MemoryLedger:
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
        read = sum(map(_extent, tensors_in(given)))
        made = list(tensors_in(result))
        self._parts += max(len(made), 1)
        if self._parts > min(_MAX_PARTS, self._parts_before + MAX_RESULTS):
            raise TooLarge("it is made of too many operators")
        elements = sum(map(_extent, made))
        self._new_bytes += sum(t.untyped_storage().nbytes() for t in made)
        limit_bytes(self._new_bytes, "a value")
        self.charge(_ELEMENT_WORK * (elements + read) + _multiplications(func, given, elements))

    def charge(self, work: float) -> None:
        """So much is computed."""
        self._unit.work += work
        if self._unit.work > MAX_WORK:
            raise TooLarge("it would compute for weeks")

    def keep(self, tensor: Tensor) -> int:
        """Autograd keeps it for the backward, by this number: a result would hold itself."""
        key = storage_key(tensor)
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
        self._values[register] = list(tensors_in(result))
        for tensor in self._values[register]:
            self._use(tensor)
        self._unit.peak_bytes = max(self._unit.peak_bytes, self._alive_bytes)

    def free(self, registers: Iterable[int]) -> None:
        """Nothing reads these any more."""
        for register in registers:
            for tensor in self._values.pop(register, ()):
                key = storage_key(tensor)
                self._users[key] -= 1
                if not self._users[key]:
                    del self._users[key]
                    if key not in self._own:
                        self._alive_bytes -= tensor.untyped_storage().nbytes()

    def _use(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._users and key not in self._own:
            self._alive_bytes += tensor.untyped_storage().nbytes()
        self._users[key] = self._users.get(key, 0) + 1


def limit_bytes(size_bytes: int, what: str) -> None:
    if size_bytes > MAX_BYTES:
        raise TooLarge(f"the model fits no device: {what} needs more than {size_text(MAX_BYTES)}")


def storage_key(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _extent(tensor: Tensor) -> int:
    """Its elements; where one side is 0, kernels go along the others all the same."""
    return tensor.numel() or math.prod(max(size, 1) for size in tensor.shape)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


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
        given = list(tensors_in(args))
        return 30.0 * sum(t.numel() * max(t.shape[-2:], default=1) for t in given)
    return 0.0
