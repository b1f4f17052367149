"""The addresses of tensor frames (stream, micro-batch, slice) as messages; requests for replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from torch import Tensor

from p2ptrain.errors import ProtocolError
from p2ptrain.job.rounds import MOST_LENGTHS, Round, RoundMode
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.model.wire.tensor_codec import pack
from p2ptrain.model.wire.tensor_layout import WireFormat
from p2ptrain.net.fields import FrameFields
from p2ptrain.net.forms import Count, Flat, Key, Length, Positive, Rare, Text
from p2ptrain.net.message import Message, PartKind


@dataclass(frozen=True, slots=True)
class MicroBatchKey(FrameFields):
    """One micro-batch of one round."""

    round: Count
    micro_batch: Count


@dataclass(frozen=True, slots=True)
class SampleRange:
    """Samples [first, end) of a micro-batch, and the device that has or wants them."""

    device: str
    first: int
    end: int

    @property
    def size(self) -> int:
        """How many."""
        return self.end - self.first


Value: TypeAlias = Tensor | None

VALUES_PER_MESSAGE = 24


@dataclass(frozen=True, slots=True)
class MicroBatchSlice(FrameFields):
    """What a frame says of the values it carries.

    Attributes:
        key: which micro-batch of which round.
        size: samples of the whole micro-batch.
        first, end: the samples of it that these values belong to.
        lengths: of its samples, where these differ from batch to batch.
    """

    key: Annotated[MicroBatchKey, Flat()]
    mode: RoundMode
    size: Positive
    first: Annotated[Count, Key("from")]
    end: Annotated[Count, Key("to")]
    lengths: Annotated[tuple[Count, ...], Length(MOST_LENGTHS), Rare()] = ()

    def __post_init__(self) -> None:
        if not self.first < self.end <= self.size:
            raise ValueError(f"samples {self.first} to {self.end} of {self.size}")

    @staticmethod
    def whole(
        key: MicroBatchKey, mode: RoundMode, size: int, lengths: tuple[int, ...] = ()
    ) -> MicroBatchSlice:
        """All samples of a micro-batch."""
        return MicroBatchSlice(key, mode, size, 0, size, lengths)

    def of(self, part: SampleRange) -> MicroBatchSlice:
        """Those samples of the same micro-batch."""
        return MicroBatchSlice(self.key, self.mode, self.size, part.first, part.end, self.lengths)

    @property
    def samples(self) -> int:
        """How many these values belong to."""
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class ValuesFields(FrameFields):
    """Which of `count` values a frame carries, from `first` on; each as its codec describes it."""

    first: Count
    count: Count
    values: Annotated[tuple[Any, ...], Length(VALUES_PER_MESSAGE)]

    def __post_init__(self) -> None:
        if self.first + len(self.values) > self.count:
            raise ValueError(f"values beyond the last of {self.count}")


def to_messages(
    kind: str,
    address: Mapping[str, Any],
    piece: MicroBatchSlice,
    values: Sequence[Value],
    part_kind: PartKind,
    wire: WireFormat = WireFormat.EXACT,
) -> list[Message]:
    """The messages that carry `values`; an empty list of values still takes one."""
    messages = []
    for first in range(0, max(len(values), 1), VALUES_PER_MESSAGE):
        entries: list[Any] = []
        parts: list[memoryview] = []
        for value in values[first : first + VALUES_PER_MESSAGE]:
            packed = None if value is None else pack(value, wire)
            entries.append(None if packed is None else packed.meta)
            parts += [] if packed is None else [packed.part]
        fields = {
            **address,
            **piece.fields(),
            **ValuesFields(first, len(values), tuple(entries)).fields(),
        }
        messages.append(Message(kind, fields, tuple(parts), (part_kind,) * len(parts)))
    return messages


@dataclass(frozen=True, slots=True)
class StreamId(FrameFields):
    """One flow into one stage of one generation. The holder counts as stage `len(stages)`."""

    key: Annotated[GenerationKey, Flat()]
    stage: Count
    flow: Annotated[str, Text(32)]


@dataclass(frozen=True, slots=True)
class ResendLogged(FrameFields):
    """Send what went to `stream.stage` on that flow in a step of a generation that is over.

    Attributes:
        stream: where it goes now.
        logged: that generation.
        step: updates applied before the round.
    """

    stream: Annotated[StreamId, Flat()]
    logged: Count
    step: Count

    @property
    def key(self) -> GenerationKey:
        """Of the generation that is over."""
        return GenerationKey(self.stream.key.job, self.logged)


@dataclass(frozen=True, slots=True)
class ResendSamples(FrameFields):
    """Send the samples of a training round.

    Attributes:
        stream: the stage that they go to; its flow is one of those it takes from the holder.
        weighed: behind the targets their weight is wanted.
    """

    stream: Annotated[StreamId, Flat()]
    shape: Annotated[Round, Flat()]
    weighed: bool = False

    def __post_init__(self) -> None:
        if self.shape.mode is not RoundMode.TRAIN:
            raise ProtocolError("only rounds of training are fed again")
