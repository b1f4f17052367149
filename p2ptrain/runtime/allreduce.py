"""All-reduce inside a stage that several devices hold, begun while the last backward still runs.

    compute thread        event loop                               next device of the ring
    backward: final(a)
              final(b) --> bucket ready: check, pack --- step 0 -->
              final(c)     chunk from the previous device: add --- step 1 -->
                ...        ...                  : copy, last one: unpack into .grad
    (waiting)  finish()    all buckets unpacked

Buckets start in one order on all devices, at most `WINDOW` of them at a time: enough to keep the
link full although each needs 2 (g - 1) hops, and a bound for what a neighbour may send: while one
bucket of a device is unfinished, its neighbour has begun fewer than 2 · WINDOW buckets after it.
What arrives for a bucket that this device has not begun waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Annotated

import torch
from torch import Tensor

from p2ptrain import failpoints
from p2ptrain.aio.tasks import task_scope
from p2ptrain.errors import InternalError, ProtocolError
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.messages.tensors import StreamId
from p2ptrain.model.wire.rounding import decoded, encode, encoded_bytes
from p2ptrain.model.wire.tensor_codec import bytes_of
from p2ptrain.net.fields import FrameFields
from p2ptrain.net.forms import Count, Length
from p2ptrain.net.message import Fields
from p2ptrain.runtime.allreduce_buckets import (
    ArrivedSums,
    BucketReadiness,
    BucketReduction,
    GradientBucket,
    RingPlace,
)
from p2ptrain.runtime.io.tensor_router import TensorRouter
from p2ptrain.runtime.not_finite import MicroBatchNotFinite
from p2ptrain.runtime.reduced_tensors import ReducedTensors

FLOW = "ring"

WINDOW = 4
"""Buckets under way at once. Raising it costs memory (up to three times 4 MiB each); lowering it
leaves a link idle where that many take less time than the way round the ring."""


PRESENT_LIMIT_BYTES = 1 << 16
"""A bit for each tensor of a bucket."""


@dataclass(frozen=True, slots=True)
class _ChunkFields(FrameFields):
    """Which chunk a frame carries.

    Attributes:
        present: a bit for each of the bucket's entries, set where some device had a value.
    """

    round: Count
    bucket: Count
    step: Count
    present: Annotated[bytes, Length(PRESENT_LIMIT_BYTES)]

    @property
    def key(self) -> tuple[int, int, int]:
        """Names the frame."""
        return self.round, self.bucket, self.step


@dataclass(frozen=True, order=True, slots=True)
class _OutgoingChunk:
    """One that waits to be sent: the lowest rank first, of one rank the oldest."""

    rank: int
    number: int
    bucket: int
    step: int


@dataclass(slots=True)
class _ReceivedChunks:
    """What this device was sent and has not used yet.

    Attributes:
        opened: frames whose bytes are arriving -> where to, as they travel.
        held: bucket that this device has not begun, as (round, number) -> its whole frames.
        next_round: index of the round after this one, once a frame has named it.
    """

    opened: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    held: dict[tuple[int, int], list[tuple[_ChunkFields, Tensor]]] = field(default_factory=dict)
    next_round: int | None = None

    def has(self, frame: _ChunkFields) -> bool:
        """Whether that frame came before."""
        waiting = self.held.get((frame.round, frame.bucket), ())
        return frame.key in self.opened or any(other.key == frame.key for other, _ in waiting)


class RingAllReduce:
    """One stage's part in its group's sums, on this device, for one generation.

    `begin`, `final` (from the compute thread) and `finish` frame each round of training, and `run`
    runs beside them all the time. Implements `tensor_router.StreamReceiver`.

    Attributes:
        summed: what.
        arrived: which of this round's sums are there.
    """

    def __init__(
        self,
        summed: ReducedTensors,
        stream: StreamId,
        devices: Sequence[str],
        own: str,
        router: TensorRouter,
    ) -> None:
        """Connect the ring.

        Args:
            summed: of the stage.
            stream: of this stage, flow `FLOW`.
            devices: of the group, at least two, in the plan's order.
            own: this device.
            router: where frames come and go.
        """
        self._own = own
        place = devices.index(own)
        self._ring = RingPlace(place, len(devices))
        self._next = devices[(place + 1) % len(devices)]
        self._stream = stream
        self._router = router
        self.summed = summed
        self._readiness = BucketReadiness(summed.buckets, summed.statistics_names)
        self._loop = asyncio.get_running_loop()
        self._order: RoundOrder | None = None
        self._since = 0.0  # the first bucket of the round was packed
        self._begun = len(self.summed.buckets)  # buckets of this round that have been packed
        self._sums: dict[int, BucketReduction] = {}  # those of them that are not complete
        self._arriving = _ReceivedChunks()
        # Each bucket under way has one entry a step at most.
        self._outgoing: asyncio.PriorityQueue[_OutgoingChunk] = asyncio.PriorityQueue(
            WINDOW * self._ring.steps
        )
        self._numbers = count()
        self._settled = asyncio.Event()  # all buckets of the round are complete, or `_failure`
        self._failing = asyncio.Event()
        self._failure: Exception | None = None
        self.arrived = ArrivedSums()
        router.connect_receiver(stream, self, {devices[place - 1]})

    # -- a round, as the stage runner sees it ----------------------------------------------------

    def begin(self, order: RoundOrder) -> None:
        """A round of training starts; call it before its first forward.

        Raises:
            ProtocolError: the neighbour already works on another round.
        """
        if self._sums or self._begun < len(self.summed.buckets):
            raise InternalError("a round begins before the sums of the last one are complete")
        if self._arriving.next_round not in (None, order.round.index):
            raise ProtocolError(f"sums of round {self._arriving.next_round} arrived unasked")
        self._order, self._since = order, 0.0
        self.summed.begin()
        self.summed.leaves_out, self.summed.skips = order.leaves_out, order.may_be_skipped
        self._begun = 0
        self._arriving.next_round = None
        self._readiness.reset()
        self._settled.clear()
        self.arrived = ArrivedSums()

    def final(self, name: str) -> None:
        """That parameter's gradient will not change any more in this round.

        Thread-safe. All forwards of the round must be over: the first call makes the running
        statistics final too.
        """
        if self._readiness.final(name):
            self._loop.call_soon_threadsafe(self._start)

    def all_final(self) -> None:
        """What was not said to be `final` is so now: the last backward is over."""
        self._readiness.all_final()
        self._start()
        self._settle()

    async def finish(self) -> None:
        """Wait until every `.grad`, and every sum of running statistics, is the group's.

        The last backward is over. The statistics wait for their `merge`, which is part of the
        update.

        Raises:
            MicroBatchNotFinite: a gradient of this device is NaN or infinite, or a sum; also by
                `run`.
        """
        self.all_final()
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure

    async def run(self) -> None:
        """Send until cancelled.

        Raises:
            MicroBatchNotFinite: as `finish`, without waiting for it; so what `fail` was given.
            LinkClosed: the next device is out of reach.
        """
        async with task_scope() as scope:
            scope.create_task(self._send())
            await self._failing.wait()
            assert self._failure is not None
            raise self._failure

    # -- buckets ---------------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin the next bucket if it may begin; one at a time, so that the loop is not held up."""
        oldest = min(self._sums, default=self._begun)
        open_window = self._begun < min(oldest + WINDOW, len(self.summed.buckets))
        if self._failure is None and open_window and self._readiness.ready(self._begun):
            try:
                self._begin_bucket(self.summed.buckets[self._begun])
            except Exception as error:  # handed to `run` and `finish`
                self._fail(error)
            else:
                self._loop.call_soon(self._start)

    def _begin_bucket(self, bucket: GradientBucket) -> None:
        assert self._order is not None
        flat, present = self.summed.pack(bucket, self._order.round.step + 1)
        if not self._begun:
            self._since = perf_counter()
        self._begun += 1
        wire = self.summed.wire(bucket)
        self._sums[bucket.index] = BucketReduction(self._ring, flat, present, wire)
        self._put(bucket.index, 0)
        held = self._arriving.held.pop((self._order.round.index, bucket.index), ())
        for frame, values in held:
            self._receive(frame, values)

    def _receive(self, frame: _ChunkFields, values: Tensor) -> None:
        stage = self._stream.stage
        failpoints.reach_now("bucket.receive.after", device=self._own, stage=stage)
        present = int.from_bytes(frame.present, "little")
        following = self._sums[frame.bucket].receive(frame.step, present, values)
        if following is not None:
            self._put(frame.bucket, following)
        self._complete(frame.bucket)

    def _put(self, index: int, step: int) -> None:
        rank = self.summed.rank(index)
        self._outgoing.put_nowait(_OutgoingChunk(rank, next(self._numbers), index, step))

    def _complete(self, index: int) -> None:
        """If the bucket is complete, write it back and let another one begin."""
        total = self._sums[index]
        if total.complete:
            del self._sums[index]
            self._unpack(index, total)
            self.arrived.add(index)
            self._settle()
            self._start()

    def _unpack(self, index: int, total: BucketReduction) -> None:
        assert self._order is not None
        step = self._order.round.step + 1
        try:
            self.summed.unpack(self.summed.buckets[index], total.flat, total.present, step)
        except MicroBatchNotFinite as error:  # handed to `run` and `finish`
            self._fail(error)

    def _settle(self) -> None:
        if self._begun == len(self.summed.buckets) and not self._sums:
            if self._since and not self._settled.is_set() and self._order is not None:
                stage, index = self._stream.stage, self._order.round.index
                spans, now = self._router.spans, perf_counter()
                spans.add("all-reduce", self._since, now, stage=stage, round=index)
            self._settled.set()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._failing.set()
        self._settled.set()

    # -- frames ----------------------------------------------------------------------------------

    async def _send(self) -> None:
        while True:
            outgoing = await self._outgoing.get()
            index, step = outgoing.bucket, outgoing.step
            assert self._order is not None
            total = self._sums[index]
            present, chunk = total.outgoing(step)
            bucket = self.summed.buckets[index]
            bits = present.to_bytes(_present_bytes(bucket), "little")
            fields = _ChunkFields(self._order.round.index, index, step, bits).fields()
            encoded = encode(chunk, self.summed.wire(bucket))
            parts = [bytes_of(encoded)] if chunk.numel() else []
            place = {"stage": self._stream.stage, "step": self._order.round.step}
            await failpoints.reach("bucket.send.before", device=self._own, **place)
            await self._router.send_frame(self._next, self._stream, fields, parts)
            total.sent(step)
            self._complete(index)

    def open(self, peer: str, fields: Fields, part_bytes: Sequence[int]) -> list[memoryview]:
        """Memory for the chunk of a frame that this device will want.

        Raises:
            ProtocolError: it will not, or not of this size.
        """
        frame = self._checked(fields)
        bucket = self.summed.buckets[frame.bucket]
        elements = self._elements(frame)
        sizes = [encoded_bytes(self.summed.wire(bucket), bucket.dtype, elements)] * bool(elements)
        if list(part_bytes) != sizes:
            raise ProtocolError(f"a chunk of {list(part_bytes)} bytes instead of {sizes}")
        begun = self._sums.get(frame.bucket) if self._is_current(frame) else None
        place = None if begun is None else begun.place(frame.step)
        if place is None:
            encoded = torch.empty(sum(sizes), dtype=torch.uint8)
        else:
            encoded = place.view(torch.uint8)
        self._arriving.opened[frame.key] = encoded
        return [bytes_of(encoded)] if sizes else []

    def deliver(self, peer: str, fields: Fields) -> None:
        """A frame opened before has arrived whole."""
        frame = self._read(fields)
        encoded = self._arriving.opened.pop(frame.key, None)
        if encoded is None:
            raise ProtocolError("a chunk was never opened")
        bucket = self.summed.buckets[frame.bucket]
        wire = self.summed.wire(bucket)
        values = decoded(encoded, bucket.dtype, self._elements(frame), wire)
        if self._is_current(frame) and frame.bucket in self._sums:
            self._receive(frame, values)
        else:
            waiting = self._arriving.held.setdefault((frame.round, frame.bucket), [])
            waiting.append((frame, values))

    def fail(self, error: Exception) -> None:
        """A frame could not be taken in: `run` and `finish` raise `error`."""
        self._fail(error)

    def _elements(self, frame: _ChunkFields) -> int:
        """Of the frame's chunk."""
        bucket = self.summed.buckets[frame.bucket]
        first, end = self._ring.chunk(self._ring.received(frame.step), bucket.elements)
        return end - first

    def _read(self, fields: Fields) -> _ChunkFields:
        """The frame, if it is one of this generation's ring."""
        sent = _ChunkFields.read(fields)
        if sent.bucket >= len(self.summed.buckets) or sent.step >= self._ring.steps:
            raise ProtocolError(f"no step {sent.step} of bucket {sent.bucket} in this ring")
        length = _present_bytes(self.summed.buckets[sent.bucket])
        if len(sent.present) != length:
            raise ProtocolError(f"bucket {sent.bucket} has {length} bytes of presence bits")
        return sent

    def _is_current(self, frame: _ChunkFields) -> bool:
        """Whether it is of this round; else of the next one: a neighbour is never further ahead."""
        current = -1 if self._order is None else self._order.round.index
        if frame.round == current:
            return True
        if self._arriving.next_round is None and frame.round > current:
            self._arriving.next_round = frame.round
        if frame.round != self._arriving.next_round:
            raise ProtocolError(f"a chunk of round {frame.round} in round {current}")
        return False

    def _checked(self, fields: Fields) -> _ChunkFields:
        """The frame, if this device still wants it and is not flooded."""
        frame = self._read(fields)
        is_current, buckets = self._is_current(frame), len(self.summed.buckets)
        ahead = frame.bucket + (0 if is_current else buckets)
        oldest = min(self._sums, default=self._begun)
        begun = is_current and frame.bucket < self._begun
        if begun and (frame.bucket not in self._sums or self._sums[frame.bucket].has(frame.step)):
            raise ProtocolError(f"bucket {frame.bucket} was complete")
        if self._arriving.has(frame) or ahead >= oldest + 2 * WINDOW:
            raise ProtocolError(f"a chunk of bucket {frame.bucket} came twice or too early")
        return frame


def _present_bytes(bucket: GradientBucket) -> int:
    return (len(bucket.entries) + 7) // 8
