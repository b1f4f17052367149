"""Values of one flow into one stage: checked before a byte is read, rebuilt, handed over by piece.

A flow carries, for each piece (round, micro-batch), an ordered list of tensors (gradients may be
None). What dtype and shape each must have follows from the
receiver's own model description and the piece's number of samples; a frame that says otherwise is
refused before memory is taken. Lists of many values are cut into several messages, because a
message's header holds at most 4 KiB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, dtype

from p2ptrain.errors import ProtocolError
from p2ptrain.model.wire import Unpacking, pack
from p2ptrain.net.message import Message, PartKind
from p2ptrain.training.mailbox import Mailbox
from p2ptrain.training.protocol import PieceKey, integer, text
from p2ptrain.training.rounds import Mode

Value: TypeAlias = Tensor | None
Expected: TypeAlias = tuple[dtype, tuple[int, ...]]
"""dtype and shape of a tensor."""

VALUES_PER_MESSAGE = 24


@dataclass(frozen=True, slots=True)
class Piece:
    """What a frame says of the values it carries: which piece, how many samples, which mode."""

    key: PieceKey
    mode: Mode
    size: int

    def fields(self) -> dict[str, Any]:
        """As frame fields."""
        return {**self.key.fields(), "mode": self.mode.value, "size": self.size}

    @staticmethod
    def read(fields: Mapping[str, Any]) -> Piece:
        """Check and read them."""
        mode = text(fields, "mode")
        if mode not in set(Mode):
            raise ProtocolError(f"unknown mode {mode!r}")
        return Piece(PieceKey.read(fields), Mode(mode), integer(fields, "size", 1))


def to_messages(
    kind: str,
    address: Mapping[str, Any],
    piece: Piece,
    values: Sequence[Value],
    part_kind: PartKind,
) -> list[Message]:
    """The messages that carry `values`; an empty list of values still takes one."""
    messages = []
    for first in range(0, max(len(values), 1), VALUES_PER_MESSAGE):
        entries: list[Any] = []
        parts: list[memoryview] = []
        for value in values[first : first + VALUES_PER_MESSAGE]:
            packed = None if value is None else pack(value)
            entries.append(None if packed is None else packed.meta)
            parts += [] if packed is None else [packed.part]
        fields = {
            **address,
            **piece.fields(),
            "first": first,
            "count": len(values),
            "values": entries,
        }
        messages.append(Message(kind, fields, tuple(parts), (part_kind,) * len(parts)))
    return messages


@dataclass(slots=True)
class _Assembly:
    """Values of one piece as its messages come in.

    Attributes:
        values: by index, filled message by message.
        pending: first index -> values being received, between header and body.
    """

    count: int
    values: dict[int, Value] = field(default_factory=dict)
    pending: dict[int, list[Unpacking | None]] = field(default_factory=dict)


class Inlet:
    """Where one flow enters one stage.

    Args:
        name: for error messages, such as "activations of stage 2".
        expected: (mode, samples) -> what each value must be.
        capacity: pieces that may wait.
        largest: most samples a piece may have.
        optional: values may be None (gradients).
    """

    def __init__(
        self,
        name: str,
        expected: Callable[[Mode, int], Sequence[Expected]],
        *,
        capacity: int,
        largest: int,
        optional: bool = False,
    ) -> None:
        self._name = name
        self._expected = expected
        self._largest = largest
        self._optional = optional
        self._box: Mailbox[PieceKey, list[Value]] = Mailbox(name, capacity)
        self._assemblies: dict[PieceKey, _Assembly] = {}

    def open(self, fields: Mapping[str, Any], part_bytes: Sequence[int]) -> list[memoryview]:
        """Memory for a message's parts, once its header has been checked.

        Raises:
            ProtocolError: anything but what this stage expects.
        """
        piece = Piece.read(fields)
        if piece.size > self._largest:
            raise ProtocolError(f"{self._name}: a piece of {piece.size} samples")
        expected = self._expected(piece.mode, piece.size)
        first, entries = self._range(fields, len(expected))
        received = [
            self._receive(entry, expected[first + offset]) for offset, entry in enumerate(entries)
        ]
        buffers = [item.buffer for item in received if item is not None]
        if [buffer.nbytes for buffer in buffers] != list(part_bytes):
            raise ProtocolError(f"{self._name}: parts of {list(part_bytes)} bytes do not fit")
        self._assembly(piece.key, len(expected)).pending[first] = received
        return buffers

    def deliver(self, fields: Mapping[str, Any]) -> None:
        """A message opened before has arrived whole."""
        key = PieceKey.read(fields)
        first = integer(fields, "first")
        assembly = self._assemblies.get(key)
        if assembly is None or first not in assembly.pending:
            raise ProtocolError(f"{self._name}: {key} was never opened")
        for offset, item in enumerate(assembly.pending.pop(first)):
            assembly.values[first + offset] = None if item is None else item.tensor()
        if len(assembly.values) == assembly.count:
            del self._assemblies[key]
            self.put(key, [assembly.values[index] for index in range(assembly.count)])

    def put(self, key: PieceKey, values: list[Value]) -> None:
        """Hand over a piece that was made on this device."""
        self._box.put(key, values)

    async def take(self, key: PieceKey) -> list[Value]:
        """Wait for a piece."""
        return await self._box.take(key)

    def _assembly(self, key: PieceKey, count: int) -> _Assembly:
        if key not in self._assemblies:
            if len(self._assemblies) >= self._box.capacity:
                raise ProtocolError(f"{self._name}: too many pieces at once")
            self._assemblies[key] = _Assembly(count)
        return self._assemblies[key]

    def _range(self, fields: Mapping[str, Any], count: int) -> tuple[int, list[Any]]:
        entries = fields.get("values")
        first = integer(fields, "first", 0, max(count - 1, 0))
        if not isinstance(entries, list) or first + len(entries) > count:
            raise ProtocolError(f"{self._name}: {count} values expected")
        if integer(fields, "count") != count:
            raise ProtocolError(f"{self._name}: {fields['count']} values instead of {count}")
        return first, entries

    def _receive(self, entry: Any, expected: Expected) -> Unpacking | None:
        if entry is None and self._optional:
            return None
        return Unpacking(entry, expected)
