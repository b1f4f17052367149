"""Routes the frames of running generations to the stages and feeders that they are meant for.

Two kinds of frame run between the devices of a generation: `train.values` (activations, targets,
gradients, sums, outputs: see `tensor_receiver`) and `train.started` (credit: one more slice may be
sent). Both name job, generation, stage and stream; the plan says which devices may use a stream.
Frames of a generation that is not, or no longer, connected are read, dropped and counted: after a
change of plan some are always under way. A frame on another device's stream is dropped too, and
reported against its sender. A frame without memory for it, or with the wrong contents, ends the
stream, not the link: its consumer gets the error. If it ended the link, the holder would plan again
and the same frame would come again, forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol, TypeAlias

from p2ptrain.errors import NotItsPart, ProtocolError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh, display_name
from p2ptrain.messages.kinds import STARTED, VALUES
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.messages.tensors import MicroBatchSlice, StreamId, Value, to_messages
from p2ptrain.model.wire.tensor_layout import WireFormat
from p2ptrain.net.message import Fields, Message, PartKind, Priority
from p2ptrain.process.memory_budget import is_out_of_memory
from p2ptrain.recovery.standstill import MissingPiece
from p2ptrain.runtime.io.arrival_norms import StageArrival
from p2ptrain.runtime.io.tensor_receiver import TensorReceiver
from p2ptrain.runtime.spans import SpanRecorder, carried

log = get_logger(__name__)

ACTIVATIONS, GRADIENTS, TARGETS = "activations", "gradients", "targets"
"""Flows into a stage: from the one before or, into the first, the holder; from the next one; from
the holder."""


class FrameRefused(ProtocolError):
    """A device has sent what its line does not carry.

    Attributes:
        sender: its id.
    """

    def __init__(self, sender: str, message: str) -> None:
        super().__init__(message)
        self.sender = sender


class Credits:
    """How many pieces may be under way to a receiver that has not begun to work on them."""

    def __init__(self, ahead: int) -> None:
        self._free = asyncio.BoundedSemaphore(ahead)

    async def acquire(self) -> None:
        """Wait until one more piece may be sent."""
        await self._free.acquire()

    def release(self) -> None:
        """The receiver has begun one. Raises ProtocolError if none was under way."""
        try:
            self._free.release()
        except ValueError:
            raise ProtocolError("credit for a piece that was never sent") from None


class StreamReceiver(Protocol):
    """Takes the frames of one line: `TensorReceiver`, or what else gets parts that it has room
    for."""

    def open(self, peer: str, fields: Fields, part_bytes: Sequence[int]) -> Sequence[memoryview]:
        """Memory for the parts of a frame from `peer`. Raises ProtocolError."""

    def deliver(self, peer: str, fields: Fields) -> None:
        """That frame has arrived whole."""

    def fail(self, error: Exception) -> None:
        """One could not be taken in, and nothing comes after it: its consumer gets `error`."""


_Address: TypeAlias = tuple[str, int, int, str]
"""Job, generation, stage, flow: a line, as its frames name it."""

_NO_RECEIVER: tuple[StreamReceiver | None, frozenset[str]] = (None, frozenset())
"""Nor senders on a stream that has failed: what they send is dropped."""


@dataclass(slots=True)
class _ConnectedGeneration:
    """What is connected.

    Attributes:
        receivers: (stage, flow) -> receivers that take pieces from this device too.
        credits: (stage, flow, device that gives them) -> credits.
    """

    receivers: dict[tuple[int, str], TensorReceiver] = field(default_factory=dict)
    credits: dict[tuple[int, str, str], Credits] = field(default_factory=dict)


_OPEN_LIMIT = 1024
"""Transfers under way whose beginnings are kept for their spans."""


class TensorRouter:
    """All lines that end on this device.

    Attributes:
        mesh: of this device.
        spans: what this device does when, its transfers among it.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.spans = SpanRecorder()
        self._opened: dict[tuple[str, int, str, int, int], float] = {}  # when a transfer began
        self._generations: dict[GenerationKey, _ConnectedGeneration] = {}
        self._receivers: dict[_Address, tuple[StreamReceiver | None, frozenset[str]]] = {}
        self.stale_frames = 0
        mesh.route_now(VALUES, self._values, self._open)
        mesh.route_now(STARTED, self._started)

    def connect_tensors(
        self, stream: StreamId, receiver: TensorReceiver, senders: Collection[str]
    ) -> None:
        """Let values of `stream` from these devices in."""
        self.connect_receiver(stream, receiver, senders)
        self._generation(stream.key).receivers[stream.stage, stream.flow] = receiver
        receiver.note_waits(self.spans, stream.stage, stream.flow)

    def connect_receiver(
        self, stream: StreamId, receiver: StreamReceiver, senders: Collection[str]
    ) -> None:
        """Let frames of `stream` from these devices in; see `send_frame`."""
        self._generation(stream.key)
        address = (stream.key.job, stream.key.generation, stream.stage, stream.flow)
        self._receivers[address] = (receiver, frozenset(senders))

    def connect_credits(self, stream: StreamId, credits: Credits, sender: str) -> None:
        """Let device `sender` give credit on `stream`."""
        self._generation(stream.key).credits[stream.stage, stream.flow, sender] = credits

    def arrived(self, key: GenerationKey, round_index: int) -> Iterator[StageArrival]:
        """What came from other devices' stages in a round of training, and how large it was."""
        generation = self._generations.get(key)
        for (stage, flow), receiver in (
            generation.receivers.items() if generation is not None else ()
        ):
            if flow != GRADIENTS and (flow != ACTIVATIONS or not stage):
                continue
            for peer, piece, size in receiver.sizes(round_index):
                number, backward = piece.key.micro_batch, flow == GRADIENTS
                yield StageArrival(stage, backward, number, piece.first, piece.end, peer, size)

    def waits(self, key: GenerationKey) -> Iterator[MissingPiece]:
        """What stages here wait for."""
        generation = self._generations.get(key)
        for (stage, flow), receiver in (
            generation.receivers.items() if generation is not None else ()
        ):
            awaited = receiver.awaits() if flow in (ACTIVATIONS, GRADIENTS, TARGETS) else None
            if awaited is not None:
                piece, senders, seconds = awaited
                where = (stage, flow == GRADIENTS, piece.round, piece.micro_batch)
                yield MissingPiece(*where, senders, seconds)

    def disconnect(self, key: GenerationKey) -> None:
        """Drop every line of the generation."""
        self._generations.pop(key, None)
        for address in [at for at in self._receivers if at[:2] == (key.job, key.generation)]:
            del self._receivers[address]

    async def send_values(
        self,
        device: str,
        stream: StreamId,
        piece: MicroBatchSlice,
        values: Sequence[Value],
        part_kind: PartKind = PartKind.ACTIVATION,
        priority: Priority = Priority.TENSOR,
        wire: WireFormat = WireFormat.EXACT,
    ) -> None:
        """Send a piece to a stage, on this device without any copy and exactly.

        Raises LinkClosed if the device is out of reach.
        """
        if device == self.mesh.self_id:
            generation = self._generations.get(stream.key)
            if generation is not None:
                generation.receivers[stream.stage, stream.flow].put(device, piece, list(values))
            return
        messages = to_messages(VALUES, stream.fields(), piece, values, part_kind, wire)
        if self.spans.is_on:
            messages[-1] = self._noted(device, messages[-1])
        for message in messages:
            await self.mesh.send(device, message, priority)

    async def send_frame(
        self,
        device: str,
        stream: StreamId,
        fields: Fields,
        parts: Sequence[memoryview],
        *,
        kind: PartKind = PartKind.GRADIENT,
        priority: Priority = Priority.COLLECTIVE,
    ) -> None:
        """Send one frame to the receiver of `stream` on another device; usually of a collective.

        Raises LinkClosed if the device is out of reach.
        """
        kinds = (kind,) * len(parts)
        message = Message(VALUES, {**stream.fields(), **fields}, tuple(parts), kinds)
        if self.spans.is_on:
            message = self._noted(device, message)
        await self.mesh.send(device, message, priority)

    async def send_started(self, device: str, stream: StreamId) -> None:
        """Give the sender on `stream` one credit."""
        await self.mesh.send(device, Message(STARTED, stream.fields()), Priority.CONTROL)

    def _generation(self, key: GenerationKey) -> _ConnectedGeneration:
        return self._generations.setdefault(key, _ConnectedGeneration())

    def _receiver(self, peer: str, fields: Fields) -> StreamReceiver | None:
        """Who takes it; None where its generation is not connected, or its line has failed.

        Raises ProtocolError.
        """
        generation, stage = fields.get("generation"), fields.get("stage")
        job, flow = fields.get("job"), fields.get("flow")
        if (
            type(generation) is int
            and type(stage) is int
            and type(job) is str
            and type(flow) is str
        ):
            receiver, senders = self._receivers.get((job, generation, stage, flow), _NO_RECEIVER)
            if peer in senders:
                return receiver
        stream = StreamId.read(fields)
        if stream.key not in self._generations:
            return None
        raise NotItsPart(f"values for {stream.flow} of stage {stream.stage} are not its to send")

    def _open(self, peer: str, fields: Fields, sizes: Sequence[int]) -> Sequence[memoryview] | None:
        """None: it is not wanted (any more), or there is no memory for it; it is dropped."""
        try:
            receiver = self._receiver(peer, fields)
        except NotItsPart:
            return None  # `_values` says so
        if receiver is None:
            return None
        if self.spans.is_on:
            self._note_opened(peer, fields)
        try:
            return receiver.open(peer, fields, sizes)
        except Exception as error:
            self._give_up(receiver, peer, fields, error)
            return None

    def _values(self, peer: str, message: Message) -> None:
        receiver = self._receiver(peer, message.fields)
        if receiver is None:
            self._count_stale(peer, message)
            return
        try:
            if not message.parts:
                receiver.open(peer, message.fields, ())
            receiver.deliver(peer, message.fields)
        except Exception as error:
            self._give_up(receiver, peer, message.fields, error)
            return
        if self.spans.is_on:
            self._note_arrived(peer, message.fields)

    def _noted(self, device: str, message: Message) -> Message:
        """With a span from now until the link has handed all of it to its stream."""
        stage, flow, round_index, number = _place(message.fields)
        kind, where = carried("send", stage, flow), _where(stage, round_index, number)
        began, add = perf_counter(), self.spans.add

        def sent() -> None:
            add(kind, began, perf_counter(), peer=device, **where)

        return replace(message, on_sent=sent)

    def _note_opened(self, peer: str, fields: Fields) -> None:
        if len(self._opened) >= _OPEN_LIMIT:  # of generations that have ended
            self._opened.clear()
        self._opened.setdefault((peer, *_place(fields)), perf_counter())

    def _note_arrived(self, peer: str, fields: Fields) -> None:
        if fields.get("first", 0) + len(fields.get("values", ())) < fields.get("count", 0):
            return  # more messages follow with the rest
        stage, flow, round_index, number = place = _place(fields)
        end = perf_counter()
        began = self._opened.pop((peer, *place), end)
        kind, where = carried("receive", stage, flow), _where(stage, round_index, number)
        self.spans.add(kind, began, end, peer=peer, **where)

    def _give_up(
        self, receiver: StreamReceiver, peer: str, fields: Fields, error: Exception
    ) -> None:
        """Take no more of its stream, and have its consumer report that to the holder.

        Raises `error` where it is neither a lack of memory nor a frame that its line cannot take.
        """
        is_refused = isinstance(error, ProtocolError)
        if not is_refused and not is_out_of_memory(error):
            raise error
        stream = StreamId.read(fields)
        why = "frame_refused" if is_refused else "no_memory_for_frame"
        log.warning(why, stage=stream.stage, flow=stream.flow, peer=peer[:12], error=str(error))
        if is_refused:
            name = display_name(self.mesh, peer)
            error = FrameRefused(
                peer, f"what {name} sent is refused ({error}): does {name} run the same p2ptrain?"
            )
        address = (stream.key.job, stream.key.generation, stream.stage, stream.flow)
        self._receivers[address] = (None, self._receivers[address][1])
        receiver.fail(error)

    def _started(self, peer: str, message: Message) -> None:
        stream = StreamId.read(message.fields)
        generation = self._generations.get(stream.key)
        if generation is None:
            self._count_stale(peer, message)
            return
        credits = generation.credits.get((stream.stage, stream.flow, peer))
        if credits is None:
            raise NotItsPart(f"credit for {stream.flow} of stage {stream.stage} is not its to give")
        credits.release()

    def _count_stale(self, peer: str, message: Message) -> None:
        self.stale_frames += 1
        log.debug("stale_frame", peer=peer[:12], kind=message.kind, total=self.stale_frames)


def _place(fields: Fields) -> tuple[int, str, int, int]:
    """Stage, flow, round and micro-batch of a frame; of a ring's the chunk."""
    number = fields.get("micro_batch")
    if number is None:
        number = fields.get("bucket", 0) << 12 | fields.get("step", 0)
    return fields["stage"], fields["flow"], fields.get("round", 0), number


def _where(stage: int, round_index: int, number: int) -> dict[str, int]:
    return {"stage": stage, "round": round_index, "micro_batch": number}
