"""Carries what tiles tell each other between the devices of a stage, and keeps what comes early.

All that one device tells another at one moment goes in one frame (more only where its header would
grow too long). What may come follows from the layout: each message of a pass once, of a known
shape, from the device that has the sending tile. A device may be ahead of another by a few
micro-batches, as many as the schedule and the holder's credits let it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from p2ptrain.errors import ProtocolError
from p2ptrain.model.tiles.device_pass import Address
from p2ptrain.model.tiles.messages import (
    GradientSums,
    Halo,
    HaloGradient,
    Message,
    Moments,
    Subject,
)
from p2ptrain.net.message import Fields, PartKind, Priority
from p2ptrain.training.inlet import Piece
from p2ptrain.training.protocol import PieceKey
from p2ptrain.training.switchboard import Line, Switchboard
from p2ptrain.training.tiling.tiled_stage import TiledStage

FLOW = "tiles"
MESSAGES_PER_FRAME = 48
"""A frame's header holds at most 4 KiB."""

_KINDS: Mapping[str, type[Halo | HaloGradient]] = {"h": Halo, "g": HaloGradient}
_SUMS: Mapping[str, type[Moments | GradientSums]] = {"m": Moments, "s": GradientSums}
_Key: TypeAlias = tuple[PieceKey, str]


@dataclass(slots=True)
class _Pass:
    """What has come for one micro-batch.

    Attributes:
        opened: messages whose bytes are arriving.
        seen: every one so far, with those that were taken.
        arrived: what was not taken.
    """

    opened: dict[Address, Tensor] = field(default_factory=dict)
    seen: set[Address] = field(default_factory=set)
    arrived: dict[Address, Tensor] = field(default_factory=dict)


class TileExchange:
    """One device's end. Implements `switchboard.Receiver`."""

    def __init__(
        self,
        stage: TiledStage,
        line: Line,
        own: str,
        switchboard: Switchboard,
        *,
        ahead: int,
        largest: int,
    ) -> None:
        """Connect it.

        Args:
            stage: on this device.
            line: of this stage, flow `FLOW`.
            own: this device.
            ahead: most micro-batches of which others may have told something.
            largest: most samples of a micro-batch.
        """
        self._stage, self._line, self._own = stage, line, own
        self._device_of = stage.tiles.device_of
        self._switchboard = switchboard
        self._ahead, self._largest = ahead, largest
        self._passes: dict[_Key, _Pass] = {}
        self._done = -1  # all micro-batches of rounds up to this one
        self._came = asyncio.Event()
        others = {device for device in self._device_of if device != own}
        switchboard.connect_receiver(line, self, others)

    # -- as the stage's runner sees it -----------------------------------------------------------

    async def send(self, piece: Piece, messages: Sequence[Message]) -> None:
        """Tell other devices. Raises LinkClosed: one of them is out of reach."""
        by_device: dict[str, list[Message]] = {}
        for message in messages:
            by_device.setdefault(self._device_of[message.receiver], []).append(message)
        for device, told in by_device.items():
            for first in range(0, len(told), MESSAGES_PER_FRAME):
                await self._send_frame(device, piece, told[first : first + MESSAGES_PER_FRAME])

    async def take(self, piece: Piece, awaited: Sequence[frozenset[Address]]) -> list[Message]:
        """Wait until one of the tiles that wait has all it awaits; everything that has come."""
        here = self._passes.setdefault(_key(piece), _Pass())
        while not any(keys <= here.arrived.keys() for keys in awaited):
            self._came.clear()
            await self._came.wait()
        arrived, here.arrived = here.arrived, {}
        return [Message(a[2], a[0], a[1], tensor) for a, tensor in arrived.items()]

    def finished(self, piece: Piece) -> None:
        """Nothing more is awaited of that micro-batch."""
        self._passes.pop(_key(piece), None)

    def round_over(self, index: int) -> None:
        """Nor of any of that round."""
        self._done = index

    # -- frames ----------------------------------------------------------------------------------

    async def _send_frame(self, device: str, piece: Piece, messages: Sequence[Message]) -> None:
        tensors = [message.tensor.contiguous() for message in messages]
        fields = {**piece.fields(), "tiles": [_entry(message) for message in messages]}
        await self._switchboard.send_frame(
            device,
            self._line,
            fields,
            [_bytes_of(tensor) for tensor in tensors],
            kind=PartKind.ACTIVATION,
            priority=Priority.TENSOR,
        )

    def open(self, peer: str, fields: Fields, part_bytes: Sequence[int]) -> list[memoryview]:
        """Memory for what tiles here will want.

        Raises:
            ProtocolError: they will not, or not from that device, or not of this size.
        """
        piece = Piece.read(fields)
        addresses = _addresses(fields)
        if piece.size > self._largest or (piece.first, piece.end) != (0, piece.size):
            raise ProtocolError("tiles take whole micro-batches of the job's size")
        here = self._here(piece)
        buffers = [self._room(peer, piece, here, address) for address in addresses]
        if [buffer.nbytes for buffer in buffers] != list(part_bytes):
            raise ProtocolError(f"messages of tiles of {list(part_bytes)} bytes do not fit")
        return buffers

    def deliver(self, peer: str, fields: Fields) -> None:
        """A frame opened before has arrived whole."""
        here = self._passes.get(_key(Piece.read(fields)))
        for address in _addresses(fields):
            tensor = None if here is None else here.opened.pop(address, None)
            if here is None or tensor is None:
                raise ProtocolError("a message of tiles was never opened")
            here.arrived[address] = tensor
        self._came.set()

    def _here(self, piece: Piece) -> _Pass:
        key = _key(piece)
        if key not in self._passes:
            if piece.key.round <= self._done or len(self._passes) >= self._ahead:
                raise ProtocolError(f"tiles tell of {piece.key}, which is over or far ahead")
            self._passes[key] = _Pass()
        return self._passes[key]

    def _room(self, peer: str, piece: Piece, here: _Pass, address: Address) -> memoryview:
        receiver, subject, sender = address
        count = len(self._device_of)
        if not (0 <= sender < count and self._device_of[sender] == peer) or address in here.seen:
            raise ProtocolError(f"{subject} of tile {sender} twice, or not from its device")
        expected = self._stage.expected(address, piece.mode, piece.size)
        if expected is None:
            raise ProtocolError(f"tile {receiver} expects no {subject} of tile {sender}")
        here.seen.add(address)
        tensor = here.opened[address] = torch.empty(expected[1], dtype=expected[0])
        return _bytes_of(tensor)


def _key(piece: Piece) -> _Key:
    return piece.key, piece.mode.value


def _entry(message: Message) -> list[Any]:
    match message.subject:
        case Halo(group, number):
            what = ["h", group, number]
        case HaloGradient(group, number):
            what = ["g", group, number]
        case Moments(operation):
            what = ["m", operation, 0]
        case GradientSums(operation):
            what = ["s", operation, 0]
    return [*what, message.sender, message.receiver]


def _addresses(fields: Fields) -> list[Address]:
    entries = fields.get("tiles")
    if not isinstance(entries, list) or not 0 < len(entries) <= MESSAGES_PER_FRAME:
        raise ProtocolError("a frame of tiles lists what it carries")
    return [_address(entry) for entry in entries]


def _address(entry: object) -> Address:
    match entry:
        case [str(kind), int(one), int(other), int(sender), int(receiver)]:
            subject: Subject | None = None
            if kind in _KINDS:
                subject = _KINDS[kind](one, other)
            elif kind in _SUMS:
                subject = _SUMS[kind](one)
            if subject is not None:
                return receiver, subject, sender
    raise ProtocolError("tiles tell halos, moments and sums")


def _bytes_of(tensor: Tensor) -> memoryview:
    """Memory of a contiguous tensor."""
    view: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return view
