"""Values of one stream into one stage: checked before a byte is read, rebuilt, handed over.

A stream carries, for each round and micro-batch, an ordered list of tensors (gradients may be
None). The receiver's own model description and plan prescribe their dtypes and shapes and which
samples come from which device; a frame that differs is refused before memory is taken. Lists of
many values are cut into several messages, because a message's header holds at most 4 KiB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from time import monotonic, perf_counter
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, dtype

from p2ptrain.aio.mailbox import Mailbox
from p2ptrain.devices.processor import HOST
from p2ptrain.errors import InternalError, ProtocolError
from p2ptrain.job.rounds import RoundMode
from p2ptrain.messages.tensors import (
    MicroBatchKey,
    MicroBatchSlice,
    SampleRange,
    Value,
    ValuesFields,
)
from p2ptrain.model.graph.description import ModelDescription, TensorDescription
from p2ptrain.model.graph.values import ValueDescription, sample_dimension
from p2ptrain.model.stage.round_replay import size_of
from p2ptrain.model.wire.tensor_codec import HostBuffer, Unpacking
from p2ptrain.model.wire.tensor_layout import WireFormat
from p2ptrain.runtime.spans import SILENT, SpanRecorder, carried

Expected: TypeAlias = tuple[dtype, tuple[int, ...]]
"""dtype and shape of a tensor."""

Joiner: TypeAlias = Callable[[Sequence[Sequence[Value]]], list[Value]]
"""One list of values from each device -> the whole ones."""

Sources: TypeAlias = Callable[[int, int], Sequence[SampleRange]]
"""(micro-batch, its samples) -> which of them come from which device, in order."""


@dataclass(frozen=True, slots=True)
class GatheredValues:
    """The values of a piece as they came: one list from each device that had some of its samples.

    Attributes:
        slices: in the order of the samples.
        dimensions: of each value, which dimension counts samples; None = it is the same for all.
        summed: whether what is the same for all is summed (gradients) or taken once.
        joiner: puts tiles of maps together, where that is what devices have; None = samples.
    """

    slices: Sequence[Sequence[Value]]
    dimensions: Sequence[int | None]
    summed: bool
    joiner: Joiner | None = None

    def join(self) -> list[Value]:
        """The values of the whole piece. Copies only where several devices contributed."""
        if self.joiner is not None:
            return self.joiner(self.slices)
        if len(self.slices) == 1:
            return list(self.slices[0])
        columns = zip(*self.slices, strict=True)
        pairs = zip(columns, self.dimensions, strict=True)
        return [self._join_one(parts, dimension) for parts, dimension in pairs]

    def _join_one(self, parts: Sequence[Value], dimension: int | None) -> Value:
        tensors = [part for part in parts if part is not None]
        if not tensors:
            return None
        if dimension is not None:
            return torch.cat(tensors, dimension)
        total = tensors[0]
        for tensor in tensors[1:] if self.summed else ():
            total = total + tensor
        return total


@dataclass(slots=True)
class _Assembly:
    """Values of one piece from one device as its messages come in.

    Attributes:
        piece: of which samples; its messages say the same.
        begun: indices of the values that have come or are being received.
        values: by index, filled message by message.
        pending: first index -> values being received, between header and body.
    """

    piece: MicroBatchSlice
    count: int
    begun: set[int] = field(default_factory=set)
    values: dict[int, Value] = field(default_factory=dict)
    pending: dict[int, list[Unpacking | None]] = field(default_factory=dict)


class TiledValues(Protocol):
    """Values of which each device has other parts than those of some samples."""

    def leaving_expected(self, device: str, mode: RoundMode, samples: int) -> Sequence[Expected]:
        """What comes from one device."""

    def joined(self, mode: RoundMode, parts: Mapping[str, Sequence[Value]]) -> list[Value]:
        """The whole values from each device's, in any order."""


@dataclass(frozen=True, slots=True)
class StreamContents:
    """What one flow into one stage carries.

    Attributes:
        name: for error messages, such as "activations of stage 2".
        expected: (mode, samples, *lengths) -> what each value must be.
        dimensions: mode -> which dimension of each value counts samples; None = none does.
        optional: values may be None, and what all samples share is summed (gradients).
        wire: how they travel.
        tiles: where they come in tiles; None = all devices have the same of each sample.
    """

    name: str
    expected: Callable[..., Sequence[Expected]]
    dimensions: Callable[[RoundMode], Sequence[int | None]]
    optional: bool = False
    wire: WireFormat = WireFormat.EXACT
    tiles: TiledValues | None = None

    def expected_from(self, device: str, piece: MicroBatchSlice) -> Sequence[Expected]:
        """What a device sends of those samples."""
        if self.tiles is None:
            return self.expected(piece.mode, piece.samples, *piece.lengths)
        return self.tiles.leaving_expected(device, piece.mode, piece.samples)


class TensorReceiver:
    """Where one flow enters one stage.

    Args:
        contents: what may come.
        sources: ids of the senders.
        capacity: pieces that may wait.
        largest: most samples a micro-batch may have.
        longest: the same for lengths that differ from batch to batch.
        buffer: gives the memory that bytes arrive in.
    """

    def __init__(
        self,
        contents: StreamContents,
        sources: Sources,
        *,
        capacity: int,
        largest: int,
        longest: Sequence[int] = (),
        buffer: HostBuffer = HOST.host_buffer,
    ) -> None:
        self._contents = contents
        self._name = contents.name
        self._sources = sources
        self._buffer = buffer
        self._largest, self._longest = largest, longest
        self._box: Mailbox[MicroBatchKey, GatheredValues] = Mailbox(contents.name, capacity)
        self._assemblies: dict[tuple[str, MicroBatchKey], _Assembly] = {}
        self._slices: dict[MicroBatchKey, dict[str, Sequence[Value]]] = {}
        self._taken: dict[MicroBatchKey, None] = {}  # the last ones, in their order
        self._round = -1  # of the last one
        self._missing: dict[tuple[str, int], bool] = {}
        self._awaited: tuple[MicroBatchKey, int, float] | None = None
        self._sizes: dict[tuple[MicroBatchKey, str], tuple[MicroBatchSlice, float]] = {}
        self._spans, self._stage, self._flow = SILENT, 0, ""

    def note_waits(self, spans: SpanRecorder, stage: int, flow: str) -> None:
        """From now on waits for what is taken here are spans of that stage."""
        self._spans, self._stage, self._flow = spans, stage, flow

    def open(
        self, peer: str, fields: Mapping[str, Any], part_bytes: Sequence[int]
    ) -> list[memoryview]:
        """Memory for a message's parts, once its header has been checked.

        Raises:
            ProtocolError: anything but what this stage expects of that device.
        """
        piece = MicroBatchSlice.read(fields)
        self._check(peer, piece)
        expected = self._contents.expected_from(peer, piece)
        first, entries = self._range(fields, len(expected))
        assembly = self._assembly(peer, piece, len(expected))
        indices = {first, *range(first, first + len(entries))}
        if not assembly.begun.isdisjoint(indices):
            raise ProtocolError(f"{self._name} {piece.key} arrived twice")
        received = [
            self._receive(entry, expected[first + offset]) for offset, entry in enumerate(entries)
        ]
        for offset, item in enumerate(received):
            self._check_missing(peer, first + offset, item is None)
        buffers = [item.buffer for item in received if item is not None]
        if [buffer.nbytes for buffer in buffers] != list(part_bytes):
            raise ProtocolError(f"{self._name}: parts of {list(part_bytes)} bytes do not fit")
        assembly.begun |= indices
        assembly.pending[first] = received
        return buffers

    def deliver(self, peer: str, fields: Mapping[str, Any]) -> None:
        """A message opened before has arrived whole."""
        piece = MicroBatchSlice.read(fields)
        first = ValuesFields.read(fields).first
        assembly = self._assemblies.get((peer, piece.key))
        if assembly is None or first not in assembly.pending:
            raise ProtocolError(f"{self._name}: {piece.key} was never opened")
        for offset, item in enumerate(assembly.pending.pop(first)):
            assembly.values[first + offset] = None if item is None else item.tensor()
        if len(assembly.values) == assembly.count:
            del self._assemblies[peer, piece.key]
            values = [assembly.values[index] for index in range(assembly.count)]
            if piece.mode is RoundMode.TRAIN and self._contents.tiles is None:
                self._note(peer, piece, values)
            self.put(peer, piece, values)

    def _note(self, peer: str, piece: MicroBatchSlice, values: Sequence[Value]) -> None:
        self._sizes[piece.key, peer] = (piece, size_of(values))
        if len(self._sizes) > 4 * self._box.capacity:
            del self._sizes[next(iter(self._sizes))]

    def sizes(self, round_index: int) -> list[tuple[str, MicroBatchSlice, float]]:
        """What has come from other devices in a round: sender, slice, norm."""
        return [
            (peer, piece, size)
            for (key, peer), (piece, size) in self._sizes.items()
            if key.round == round_index
        ]

    def awaits(self) -> tuple[MicroBatchKey, frozenset[str], float] | None:
        """What a stage here waits for, who has not sent it, and for how many seconds."""
        if self._awaited is None:
            return None
        key, size, since = self._awaited
        due = {part.device for part in self._sources(key.micro_batch, size)}
        return key, frozenset(due - self._slices.get(key, {}).keys()), monotonic() - since

    def put(self, peer: str, piece: MicroBatchSlice, values: Sequence[Value]) -> None:
        """Hand over what `peer`, maybe this device itself, has of a piece."""
        senders = [part.device for part in self._sources(piece.key.micro_batch, piece.size)]
        here = self._slices.setdefault(piece.key, {})
        if peer in here:
            raise ProtocolError(f"{self._name} {piece.key} arrived twice")
        here[peer] = values
        if len(here) == len(senders):
            del self._slices[piece.key]
            dimensions = self._contents.dimensions(piece.mode)
            slices = [here[sender] for sender in senders]
            joiner = self._joiner(piece.mode, senders)
            self._box.put(
                piece.key, GatheredValues(slices, dimensions, self._contents.optional, joiner)
            )
        elif len(self._slices) > self._box.capacity:
            raise ProtocolError(f"{self._name}: more than {self._box.capacity} arrived unasked")

    def _joiner(self, mode: RoundMode, senders: Sequence[str]) -> Joiner | None:
        tiles = self._contents.tiles
        if tiles is None:
            return None
        return lambda slices: tiles.joined(mode, dict(zip(senders, slices, strict=True)))

    def fail(self, error: Exception) -> None:
        """Something that came could not be taken in: `take` raises `error`."""
        self._box.fail(error)

    def has(self, key: MicroBatchKey) -> bool:
        """Whether `take` would not wait."""
        return key in self._box or self._box.has_failed

    async def take(self, key: MicroBatchKey, size: int = 1) -> GatheredValues:
        """Wait for a piece of so many samples. Raises what `fail` was given."""
        self._awaited = (key, size, monotonic())
        began = perf_counter() if self._spans.is_on else 0.0
        try:
            taken = await self._box.take(key)
        finally:
            self._awaited = None
        if began:
            where = {"stage": self._stage, "round": key.round, "micro_batch": key.micro_batch}
            self._spans.add_wait(carried("wait", self._stage, self._flow), began, **where)
        self._round = max(self._round, key.round)
        self._taken[key] = None
        if len(self._taken) > 4 * self._box.capacity:
            del self._taken[next(iter(self._taken))]
        return taken

    def _check(self, peer: str, piece: MicroBatchSlice) -> None:
        if piece.size > self._largest:
            raise ProtocolError(f"{self._name}: a micro-batch of {piece.size} samples")
        if len(piece.lengths) != len(self._longest) or any(
            have > most for have, most in zip(piece.lengths, self._longest, strict=True)
        ):
            raise ProtocolError(f"{self._name}: samples of the lengths {list(piece.lengths)}")
        self._check_round(piece)
        for part in self._sources(piece.key.micro_batch, piece.size):
            if (part.device, part.first, part.end) == (peer, piece.first, piece.end):
                return
        raise ProtocolError(
            f"{self._name}: samples {piece.first} to {piece.end} of {piece.key} are not due from "
            f"{peer[:12]}"
        )

    def _check_round(self, piece: MicroBatchSlice) -> None:
        """A schedule takes rounds in order, and no sender is further ahead than slices may wait.

        Outputs come in evaluations alone: any number of other rounds lies between two of those.
        """
        key, every = piece.key, piece.mode is RoundMode.TRAIN
        if key in self._taken or key.round < self._round:
            raise ProtocolError(f"{self._name} {key} arrived again, or too late")
        if every and self._round >= 0 and key.round > self._round + self._box.capacity:
            raise ProtocolError(f"{self._name} {key} arrived long before its round")

    def _assembly(self, peer: str, piece: MicroBatchSlice, count: int) -> _Assembly:
        assembly = self._assemblies.get((peer, piece.key))
        if assembly is None:
            if sum(one == peer for one, _ in self._assemblies) >= self._box.capacity:
                raise ProtocolError(f"{self._name}: too many pieces at once")
            assembly = self._assemblies[peer, piece.key] = _Assembly(piece, count)
        if assembly.piece != piece:
            raise ProtocolError(f"{self._name}: the messages of {piece.key} differ")
        return assembly

    def _range(self, fields: Mapping[str, Any], count: int) -> tuple[int, tuple[Any, ...]]:
        sent = ValuesFields.read(fields)
        if sent.count != count:
            raise ProtocolError(f"{self._name}: {sent.count} values instead of {count}")
        return sent.first, sent.values

    def _check_missing(self, peer: str, index: int, is_missing: bool) -> None:
        """A graph gives a value a gradient always or never: without one, nothing before learns."""
        if self._missing.setdefault((peer, index), is_missing) is not is_missing:
            what = "is missing, and was there before" if is_missing else "is there, and was not"
            raise ProtocolError(f"{self._name}: value {index} {what}")

    def _receive(self, entry: Any, expected: Expected) -> Unpacking | None:
        if entry is None and self._contents.optional:
            return None
        return Unpacking(entry, expected, self._contents.wire, buffer=self._buffer)


def contents_at_cut(description: ModelDescription, boundary: int, name: str) -> StreamContents:
    """What crosses the cut before unit `boundary`, either way."""

    @lru_cache(maxsize=256)
    def expected(mode: RoundMode, size: int, *lengths: int) -> Sequence[Expected]:
        values = description.crossing(boundary, mode.value)
        return tuple(expected_of(value, size, *lengths) for value in values)

    @lru_cache(maxsize=len(RoundMode))
    def dimensions(mode: RoundMode) -> Sequence[int | None]:
        values = description.crossing(boundary, mode.value)
        return tuple(sample_dimension(value) for value in values)

    return StreamContents(name, expected, dimensions)


def gradient_contents(
    name: str, parameters: Sequence[Tensor | TensorDescription]
) -> StreamContents:
    """Gradients of these, or sums of them, whatever the samples."""
    expected = [(parameter.dtype, tuple(parameter.shape)) for parameter in parameters]
    count = len(expected)
    return StreamContents(name, lambda *_: expected, lambda _: [None] * count, optional=True)


def expected_of(value: ValueDescription, size: int, *lengths: int) -> Expected:
    if value.dtype is None:
        raise InternalError(f"{value.name} is a whole number, which never crosses a cut")
    return value.dtype, value.shape(size, *lengths)
