"""Runs a tiled stage's schedule on one of its devices, and carries the messages between its tiles.

A forward or backward computes until a value of another device is missing, sends what others need,
waits for theirs and continues. All devices of the stage take the micro-batches in the same order,
so none waits for a value that will never come.

All that one device owes another at one moment goes in one frame (more only where its header would
grow too long): halos, and sums for a normalisation, which every tile needs of every other. These
are sent to all other devices as soon as all tiles of a device have theirs. The layout says what may
arrive: each message of a pass once, of a known shape, from the device that has the sending tile. A
device may be some micro-batches ahead, as many as the schedule and the holder's credits allow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from p2ptrain.devices.interface import Arrived
from p2ptrain.errors import InternalError, ProtocolError
from p2ptrain.job.rounds import RoundMode
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.messages.tensors import MicroBatchKey, MicroBatchSlice, StreamId
from p2ptrain.model.wire.tensor_codec import bytes_of
from p2ptrain.net.message import Fields, PartKind, Priority
from p2ptrain.plan.types.timeline import EntryKind
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.runtime.executor import StageSpec
from p2ptrain.runtime.io.replay_log import ReplayLog
from p2ptrain.runtime.io.tensor_receiver import GatheredValues
from p2ptrain.runtime.io.tensor_router import TensorRouter
from p2ptrain.runtime.live_stage import LiveStage
from p2ptrain.runtime.stage_io import StageIo, StageSender
from p2ptrain.runtime.sync_executor import SyncStageExecutor
from p2ptrain.runtime.tiled.tiled_stage import TiledStage
from p2ptrain.state.snapshot_store import SnapshotStore
from p2ptrain.tiling.kernels.device_pass import Address
from p2ptrain.tiling.kernels.tile_steps import (
    GradientSums,
    Halo,
    HaloGradient,
    Moments,
    Subject,
    TileMessage,
)

FLOW = "tiles"

MESSAGES_PER_FRAME = 48
"""A frame's header holds at most 4 KiB."""

_KINDS: Mapping[str, type[Halo | HaloGradient]] = {"h": Halo, "g": HaloGradient}

_SUMS: Mapping[str, type[Moments | GradientSums]] = {"m": Moments, "s": GradientSums}

_Key: TypeAlias = tuple[MicroBatchKey, str]

Sums: TypeAlias = Moments | GradientSums

_Part: TypeAlias = tuple[list[Any], Tensor]
"""Of a frame: its entry, and what it carries."""


@dataclass(frozen=True, slots=True)
class _FramePart:
    """What one part of a frame is.

    Attributes:
        sender: tile whose it is.
        receiver: tile that it is for; of sums, which are for all, 0.
    """

    subject: Subject
    sender: int
    receiver: int


@dataclass(slots=True)
class _PassMessages:
    """What has come for one micro-batch.

    Attributes:
        opened: messages whose bytes are arriving, as the frame names them.
        seen: every one so far, with those that were taken.
        arrived: what was not taken.
        sums: of tiles here, by what they are and by tile.
    """

    opened: dict[_FramePart, Tensor] = field(default_factory=dict)
    seen: set[tuple[Subject, int, int]] = field(default_factory=set)
    arrived: dict[Address, Tensor] = field(default_factory=dict)
    sums: dict[Sums, dict[int, Tensor]] = field(default_factory=dict)


class TileExchange:
    """One device's end. Implements `tensor_router.StreamReceiver`."""

    def __init__(
        self,
        stage: TiledStage,
        stream: StreamId,
        own: str,
        router: TensorRouter,
        *,
        ahead: int,
        largest: int,
    ) -> None:
        """Connect it.

        Args:
            stage: on this device.
            stream: of this stage, flow `FLOW`.
            own: this device.
            ahead: most micro-batches of which messages may have come.
            largest: most samples of a micro-batch.
        """
        self._stage, self._stream, self._own = stage, stream, own
        self._device_of = stage.tiles.device_of
        self._router = router
        self._ahead, self._largest = ahead, largest
        self._passes: dict[_Key, _PassMessages] = {}
        self._done = -1  # all micro-batches of rounds up to this one
        self._came = asyncio.Event()
        self._failure: Exception | None = None
        self._tiles = stage.tiles.tiles(own)
        devices = stage.tiles.devices
        here = devices.index(own)  # others begin with another one: not all send to the same first
        self._others = (*devices[here + 1 :], *devices[:here])
        router.connect_receiver(stream, self, {*self._device_of} - {own})

    # -- as the stage's runner sees it -----------------------------------------------------------

    async def send(self, piece: MicroBatchSlice, messages: Sequence[TileMessage]) -> None:
        """Send to other devices. Raises LinkClosed: one of them is out of reach."""
        by_device: dict[str, list[_Part]] = {}
        for message in messages:
            subject = message.subject
            if isinstance(subject, Moments | GradientSums):
                due = self._sums_due(piece, subject, message)
                for device in self._others:
                    by_device.setdefault(device, []).extend(due)
            else:
                device = self._device_of[message.receiver]
                by_device.setdefault(device, []).append(_halo_part(message))
        for device, parts in by_device.items():
            await self._send_all(device, piece, parts)

    def _sums_due(self, piece: MicroBatchSlice, subject: Sums, message: TileMessage) -> list[_Part]:
        """The sums of all tiles here, once the last one's are there."""
        here = self._passes.setdefault(_key(piece), _PassMessages())
        sums = here.sums.setdefault(subject, {})
        if message.sender in sums:  # the pass says them once for each tile that is to have them
            return []
        sums[message.sender] = message.tensor
        if len(sums) < len(self._tiles):
            return []
        kind = "m" if isinstance(subject, Moments) else "s"
        return [([kind, subject.operation, tile], sums[tile]) for tile in self._tiles]

    async def take(
        self, piece: MicroBatchSlice, awaited: Sequence[frozenset[Address]]
    ) -> list[TileMessage]:
        """Wait until one of the tiles that wait has all it awaits; everything that has come.

        Raises what `fail` was given.
        """
        here = self._passes.setdefault(_key(piece), _PassMessages())
        while not any(keys <= here.arrived.keys() for keys in awaited):
            if self._failure is not None:
                raise self._failure
            self._came.clear()
            await self._came.wait()
        arrived, here.arrived = here.arrived, {}
        return [TileMessage(a[2], a[0], a[1], tensor) for a, tensor in arrived.items()]

    def finished(self, piece: MicroBatchSlice) -> None:
        """Nothing more is awaited of that micro-batch."""
        self._passes.pop(_key(piece), None)

    def round_over(self, index: int) -> None:
        """Nor of any of that round."""
        self._done = index

    # -- frames ----------------------------------------------------------------------------------

    async def _send_all(self, device: str, piece: MicroBatchSlice, parts: Sequence[_Part]) -> None:
        for first in range(0, len(parts), MESSAGES_PER_FRAME):
            some = parts[first : first + MESSAGES_PER_FRAME]
            await self._router.send_frame(
                device,
                self._stream,
                {**piece.fields(), "tiles": [entry for entry, _ in some]},
                [bytes_of(tensor.contiguous()) for _, tensor in some],
                kind=PartKind.ACTIVATION,
                priority=Priority.TENSOR,
            )

    def open(self, peer: str, fields: Fields, part_bytes: Sequence[int]) -> list[memoryview]:
        """Memory for what tiles here will want.

        Raises:
            ProtocolError: they will not, or not from that device, or not of this size.
        """
        piece = MicroBatchSlice.read(fields)
        entries = _entries(fields)
        if piece.size > self._largest or (piece.first, piece.end) != (0, piece.size):
            raise ProtocolError("tiles take whole micro-batches of the job's size")
        here = self._here(piece)
        buffers = [self._room(peer, piece, here, entry) for entry in entries]
        if [buffer.nbytes for buffer in buffers] != list(part_bytes):
            raise ProtocolError(f"messages of tiles of {list(part_bytes)} bytes do not fit")
        return buffers

    def deliver(self, peer: str, fields: Fields) -> None:
        """A frame opened before has arrived whole."""
        piece = MicroBatchSlice.read(fields)
        here = self._passes.get(_key(piece))
        for entry in _entries(fields):
            tensor = None if here is None else here.opened.pop(entry, None)
            if here is None or tensor is None:
                raise ProtocolError("a message of tiles was never opened")
            if isinstance(entry.subject, Moments | GradientSums):
                for tile in self._tiles:
                    here.arrived[tile, entry.subject, entry.sender] = tensor
            else:
                here.arrived[entry.receiver, entry.subject, entry.sender] = tensor
        self._came.set()

    def fail(self, error: Exception) -> None:
        """A frame could not be taken in: `take` raises `error`."""
        self._failure = error
        self._came.set()

    def _here(self, piece: MicroBatchSlice) -> _PassMessages:
        key = _key(piece)
        if key not in self._passes:
            if piece.key.round <= self._done or len(self._passes) >= self._ahead:
                raise ProtocolError(f"tiles tell of {piece.key}, which is over or far ahead")
            self._passes[key] = _PassMessages()
        return self._passes[key]

    def _room(
        self, peer: str, piece: MicroBatchSlice, here: _PassMessages, entry: _FramePart
    ) -> memoryview:
        subject, sender = entry.subject, entry.sender
        is_sum = isinstance(subject, Moments | GradientSums)
        receiver = self._tiles[0] if is_sum else entry.receiver
        if not self._has(peer, sender):
            raise ProtocolError(f"{subject} of tile {sender} is not due from its sender")
        if (subject, sender, receiver) in here.seen:
            raise ProtocolError(f"{subject} of tile {sender} came twice")
        expected = self._stage.expected((receiver, subject, sender), piece.mode, piece.size)
        if expected is None:
            raise ProtocolError(f"tile {receiver} expects no {subject} of tile {sender}")
        here.seen.add((subject, sender, receiver))
        tensor = here.opened[entry] = torch.empty(expected[1], dtype=expected[0])
        return bytes_of(tensor)

    def _has(self, device: str, tile: int) -> bool:
        return 0 <= tile < len(self._device_of) and self._device_of[tile] == device


def _key(piece: MicroBatchSlice) -> _Key:
    return piece.key, piece.mode.value


def _halo_part(message: TileMessage) -> _Part:
    match message.subject:
        case Halo(group, number):
            kind = "h"
        case HaloGradient(group, number):
            kind = "g"
        case _:
            raise InternalError("sums are for all devices")
    return [kind, group, number, message.sender, message.receiver], message.tensor


def _entries(fields: Fields) -> list[_FramePart]:
    entries = fields.get("tiles")
    if not isinstance(entries, list) or not 0 < len(entries) <= MESSAGES_PER_FRAME:
        raise ProtocolError("a frame of tiles lists what it carries")
    return [_entry(entry) for entry in entries]


def _entry(entry: object) -> _FramePart:
    match entry:
        case [str(kind), int(group), int(number), int(sender), int(receiver)] if kind in _KINDS:
            return _FramePart(_KINDS[kind](group, number), sender, receiver)
        case [str(kind), int(operation), int(tile)] if kind in _SUMS:
            return _FramePart(_SUMS[kind](operation), tile, 0)
    raise ProtocolError("tiles tell halos, moments and sums")


class TiledStageExecutor(SyncStageExecutor):
    """The tiles of one device, for one generation of synchronous rounds."""

    def __init__(
        self,
        task: StageSpec,
        live: LiveStage,
        links: StageSender,
        io: StageIo,
        compute: ComputeThread,
        store: SnapshotStore,
        log: ReplayLog,
        exchange: TileExchange,
    ) -> None:
        """`exchange`: with the stage's other devices; the rest as `SyncStageExecutor`."""
        super().__init__(task, live, links, io, compute, store, log)
        assert isinstance(live.stage, TiledStage)
        self._stage = live.stage
        self._exchange = exchange
        self.waits_for_group = True  # at any time, in the middle of a forward too

    async def _train(self, order: RoundOrder) -> None:
        await super()._train(order)
        self.waits_for_group = True
        self._exchange.round_over(order.round.index)

    async def _evaluate(self, order: RoundOrder) -> float:
        for piece in self.task.pieces(order.round):
            inputs, _ = await self._inputs(order, piece)
            await self._run_forward(piece, inputs)
            outputs = self._stage.outputs(piece.key.micro_batch, RoundMode.EVAL)
            self._stage.forget(piece.key.micro_batch, RoundMode.EVAL)
            self._exchange.finished(piece)
            assert self._io.forward is not None, "no loss is computed in tiles"
            await self._io.forward.put(piece, Arrived(outputs))
        self._exchange.round_over(order.round.index)
        return 0.0

    async def _forward(self, order: RoundOrder, piece: MicroBatchSlice) -> float:
        """Returns 0.0: no loss is computed in tiles."""
        inputs, _ = await self._inputs(order, piece)
        await self._run_forward(piece, inputs)
        outputs = self._stage.outputs(piece.key.micro_batch, RoundMode.TRAIN)
        return await self._give_forward(order, piece, Arrived(outputs))

    async def _run_forward(self, piece: MicroBatchSlice, inputs: GatheredValues) -> None:
        key, mode = piece.key.micro_batch, piece.mode

        def begin() -> list[TileMessage]:
            if mode is RoundMode.TRAIN:
                self._save()
            images = [value for value in inputs.join() if value is not None]
            return self._stage.begin_forward(key, mode, images, piece.samples)

        await self._carry(piece, (1, -self.task.index), begin)

    async def _whole_backward(
        self, order: RoundOrder, piece: MicroBatchSlice, final: Callable[[str], None] | None
    ) -> None:
        given = await self._gradients(order, piece)
        assert given is not None, "no loss is computed in tiles"
        key = piece.key.micro_batch
        notified: set[str] = set()

        def begin() -> list[TileMessage]:
            return self._stage.begin_backward(key, given.join())

        def notify() -> None:
            """Their sum goes round while earlier groups are still computed."""
            if final is None:
                return
            for name in self._stage.final_names(key):
                if name not in notified:
                    notified.add(name)
                    final(name)

        await self._carry(piece, (0, self.task.index), begin, notify)
        self._stage.forget(key, RoundMode.TRAIN)
        self._exchange.finished(piece)
        await self._give_backward(order, piece, Arrived([]))

    async def _carry(
        self,
        piece: MicroBatchSlice,
        urgency: tuple[int, ...],
        begin: Callable[[], list[TileMessage]],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Run a forward or backward to its end; `after` is called each time it has gone on."""
        key, mode = piece.key.micro_batch, piece.mode
        kind: EntryKind = "forward" if urgency[0] else "backward"
        sent = await self._run(urgency, begin, kind, piece.key)
        while True:
            await self._exchange.send(piece, sent)
            after()
            passing = self._stage.passing(key, mode)
            awaited = passing.awaits
            if not awaited:
                return
            began = perf_counter()
            arrived = await self._exchange.take(piece, awaited)
            self._note_wait("wait halo", began)
            sent = await self._run(urgency, partial(passing.receive, arrived), kind, piece.key)
