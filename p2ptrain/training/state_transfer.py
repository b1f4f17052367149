"""Moving named tensors from one device to another: a manifest first, then ranges of it.

    reader                                    server
      |-- state.manifest {source, units} ------->|   which tensors, with their wire forms
      |<------------- [[name, meta], ...] -------|
      |-- state.read {first, end} -------------->|   several at once, to keep the link full
      |<------------- parts ---------------------|

A server is the data holder, or a device that hands on what it is reading itself (`relay`): its
answers come as soon as there is something to answer.

Names are `model:<state name>` and `optimizer:<parameter name>.<slot>`. A reader knows dtype and
shape of every model tensor from its description and refuses others; an optimizer slot has its
parameter's shape or is a scalar.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from p2ptrain.errors import PeerError, ProtocolError
from p2ptrain.mesh.interface import Mesh
from p2ptrain.model.wire import PackedTensor, Unpacking, copy_into, pack
from p2ptrain.net import cbor
from p2ptrain.net.message import Fields, Message, PartKind, Priority
from p2ptrain.training.parts import limited
from p2ptrain.training.protocol import (
    BLOB_LIMIT_BYTES,
    STATE_MANIFEST,
    STATE_READ,
    EpochKey,
    integer,
    text,
)
from p2ptrain.training.relay import Entries, Relay, Relays
from p2ptrain.training.scope import task_scope
from p2ptrain.training.versions import Named

Source: TypeAlias = Callable[[int, int], Named]
"""(first unit, end unit) -> the tensors by name."""
After: TypeAlias = Callable[[], Awaitable[None]]
"""What a reader waits for; raises PeerError where it will not come."""
Check: TypeAlias = Callable[[str], tuple[torch.dtype, tuple[int, ...]]]
"""Name -> the dtype and shape it must have; raises ProtocolError for an unknown name."""

_Key: TypeAlias = tuple[str, str, str, int, int]
"""(job, source, reader, first unit, end unit)."""

INITIAL = "initial"
"""The source that the holder offers for the job's time: the weights it begins with."""
RELAY = "relay"
"""The source that a device of a group offers to the next one while an epoch is prepared."""
STAGE = "stage"
"""What a stage has now, its optimizer's part included."""
WEIGHTS = "weights"
"""The same without that part: what comes home in the end."""
RANGE_BYTES = 2 << 20
RANGE_TENSORS = 32
READS_IN_FLIGHT = 3
READ_TIMEOUT_SECONDS = 300.0


async def at_once() -> None:
    """Nothing to wait for."""


class _Served(Protocol):
    """A state that a reader has opened."""

    async def entries(self) -> Entries:
        """The manifest."""

    async def parts(self, first: int, end: int) -> Sequence[memoryview]:
        """The bytes of tensors [first, end)."""

    def served(self) -> None:
        """The reader has everything."""


class _Packed:
    """A state that is here."""

    def __init__(self, named: Named) -> None:
        self._tensors: list[tuple[str, PackedTensor]] = [(n, pack(t)) for n, t in named.items()]

    async def entries(self) -> Entries:
        return [(name, tensor.meta) for name, tensor in self._tensors]

    async def parts(self, first: int, end: int) -> Sequence[memoryview]:
        return [tensor.part for _, tensor in self._tensors[first:end]]

    def served(self) -> None:
        self._tensors = []


class StateServer:
    """Serves named tensors of this device to the members of a job.

    Attributes:
        relays: what this device hands on while it reads it.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.relays = Relays()
        self._sources: dict[tuple[str, str], tuple[Source, After]] = {}
        self._opened: dict[_Key, _Opened] = {}
        mesh.route(STATE_MANIFEST, self._manifest)
        mesh.route(STATE_READ, self._read)

    def offer(self, job: str, source: str, tensors: Source, after: After = at_once) -> None:
        """Serve `tensors` under (job, source) until `withdraw`; `after` is awaited each time."""
        self._sources[job, source] = (tensors, after)

    def withdraw(self, job: str, *, keep: Collection[str] = ()) -> None:
        """Serve nothing of this job any more, but the sources in `keep`."""
        self._sources = {k: v for k, v in self._sources.items() if k[0] != job or k[1] in keep}
        self._opened = {k: v for k, v in self._opened.items() if k[0] != job or k[1] in keep}

    def retract(self, job: str, sources: Collection[str]) -> None:
        """Serve these sources of the job no more."""
        gone = {(job, source) for source in sources}
        self._sources = {k: v for k, v in self._sources.items() if k not in gone}
        self._opened = {k: v for k, v in self._opened.items() if k[:2] not in gone}

    def now(self, job: str, source: str, first: int, end: int) -> Named:
        """The tensors themselves, whatever a reader would wait for."""
        return self._source(job, source)[0](first, end)

    async def local(self, job: str, source: str, first: int, end: int) -> dict[str, Tensor]:
        """The same tensors for this device itself, copied; laid out as they are."""
        named = await self.here(job, source, first, end)
        return {name: copy_into(None, tensor) for name, tensor in named.items()}

    async def here(self, job: str, source: str, first: int, end: int) -> Named:
        """The same tensors themselves."""
        tensors, after = self._source(job, source)
        await after()
        return tensors(first, end)

    async def _manifest(self, peer: str, message: Message) -> Message:
        key = self._key(peer, message.fields)
        served = await self._serve(message.fields, key)
        entries = await served.entries()
        self._opened[key] = _Opened(served, len(entries))
        blob = cbor.dumps([list(entry) for entry in entries])
        return Message(STATE_MANIFEST, {}, (memoryview(blob),))

    async def _read(self, peer: str, message: Message) -> Message:
        key = self._key(peer, message.fields)
        opened = self._opened.get(key)
        if opened is None:
            raise ProtocolError("state.read without a manifest")
        first = integer(message.fields, "from", 0, opened.tensors)
        end = integer(message.fields, "to", first, opened.tensors)
        parts = tuple(await opened.served.parts(first, end))
        if end == opened.tensors:
            self._opened.pop(key, None)
            opened.served.served()
        return Message(STATE_READ, {}, parts, (PartKind.WEIGHT,) * len(parts))

    async def _serve(self, fields: Fields, key: _Key) -> _Served:
        job, source, _, first, end = key
        if source == RELAY:
            return self.relays.get(EpochKey.read(fields), first, end)
        return _Packed(await self.here(job, source, first, end))

    def _source(self, job: str, source: str) -> tuple[Source, After]:
        if (job, source) not in self._sources:
            raise PeerError(f"this device has no state {source!r} of that job")
        return self._sources[job, source]

    @staticmethod
    def _key(peer: str, fields: Fields) -> _Key:
        return (
            text(fields, "job", 64),
            text(fields, "source", 64),
            peer,
            integer(fields, "first"),
            integer(fields, "end"),
        )


@dataclass(frozen=True, slots=True)
class _Opened:
    served: _Served
    tensors: int


@dataclass(frozen=True, slots=True)
class StateRequest:
    """What to read from whom.

    Attributes:
        timeout_seconds: for the manifest, and for each range.
        epoch: of the plan that is prepared; told to a device that hands on what it reads.
    """

    peer: str
    job: str
    source: str
    first: int
    end: int
    timeout_seconds: float = READ_TIMEOUT_SECONDS
    epoch: int = 0

    def fields(self) -> dict[str, Any]:
        """As frame fields."""
        return {
            "job": self.job,
            "epoch": self.epoch,
            "source": self.source,
            "first": self.first,
            "end": self.end,
        }


async def read_state(mesh: Mesh, request: StateRequest, check: Check) -> dict[str, Tensor]:
    """Fetch every tensor of `request`, at bulk priority.

    Raises:
        ProtocolError: the other side offers what `check` refuses.
        LinkClosed, TimeoutError, PeerError: it is gone, too slow, or has no such state.
    """
    reading = StateReading(mesh, check)
    await reading.read_from(request)
    return reading.tensors()


class StateReading:
    """A state on its way to this device, from one device or from several in turn.

    Args:
        onward: is told what arrives, to hand it on.
    """

    def __init__(self, mesh: Mesh, check: Check, onward: Relay | None = None) -> None:
        self._mesh = mesh
        self._check = check
        self._onward = onward
        self._entries: list[_Entry] | None = None
        self._tensors: dict[str, Tensor] = {}

    async def read_from(self, request: StateRequest) -> None:
        """Fetch what is still missing. Raises as `read_state`; what has come by then is kept."""
        self._open(await self._manifest(request))
        gate = asyncio.Semaphore(READS_IN_FLIGHT)

        async def read(first: int, end: int) -> None:
            async with gate:
                await self._read_range(request, first, end)

        # The last range is read alone: it tells the server that the manifest has served.
        *ranges, last = self._missing() or [(0, 0)]
        async with task_scope() as group:
            for first, end in ranges:
                group.create_task(read(first, end))
        await self._read_range(request, *last)

    def tensors(self) -> dict[str, Tensor]:
        """Everything by name, in the order of the manifest, once `read_from` has returned."""
        return {name: self._tensors[name] for name, _, _ in self._entries or ()}

    async def _manifest(self, request: StateRequest) -> list[_Entry]:
        reply = await self._mesh.call(
            request.peer,
            Message(STATE_MANIFEST, request.fields()),
            timeout_seconds=request.timeout_seconds,
            priority=Priority.TENSOR,
            reply_parts=limited(BLOB_LIMIT_BYTES),
        )
        return _check_manifest(bytes(reply.parts[0]), self._check)

    def _open(self, entries: list[_Entry]) -> None:
        if self._entries is None:
            self._entries = entries
            if self._onward is not None:
                self._onward.begin([(name, meta) for name, meta, _ in entries])
        elif self._entries != entries:
            raise ProtocolError("two devices offer different tensors as the same state")

    def _missing(self) -> list[tuple[int, int]]:
        entries = self._entries or []
        ranges = _ranges([_entry_bytes(*expected) for _, _, expected in entries])
        return [limits for limits in ranges if entries[limits[0]][0] not in self._tensors]

    async def _read_range(self, request: StateRequest, first: int, end: int) -> None:
        entries = (self._entries or [])[first:end]
        received = [Unpacking(meta, expected) for _, meta, expected in entries]
        buffers = [item.buffer for item in received]
        await self._mesh.call(
            request.peer,
            Message(STATE_READ, {**request.fields(), "from": first, "to": end}),
            timeout_seconds=request.timeout_seconds,
            priority=Priority.BULK,
            reply_parts=partial(_exactly, buffers),
        )
        for (name, _, _), item in zip(entries, received, strict=True):
            self._tensors[name] = item.tensor()
        if self._onward is not None:
            self._onward.arrived(first, buffers)


_Entry: TypeAlias = tuple[str, Any, tuple[torch.dtype, tuple[int, ...]]]


def _check_manifest(blob: bytes, check: Check) -> list[_Entry]:
    manifest = cbor.loads(blob, BLOB_LIMIT_BYTES)
    if not isinstance(manifest, list):
        raise ProtocolError("a manifest is a list")
    entries: list[_Entry] = []
    for entry in manifest:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ProtocolError("a manifest's entry is [name, meta]")
        entries.append((entry[0], entry[1], check(entry[0])))
    return entries


def _exactly(
    buffers: list[memoryview], peer: str, fields: Fields, sizes: Sequence[int]
) -> list[memoryview]:
    if [buffer.nbytes for buffer in buffers] != list(sizes):
        raise ProtocolError("the tensors that came are not those of the manifest")
    return buffers


def _entry_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


def _ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive ranges of at most RANGE_BYTES (or one tensor) and RANGE_TENSORS."""
    ranges: list[tuple[int, int]] = []
    first, total = 0, 0
    for index, size in enumerate(sizes):
        full = total + size > RANGE_BYTES or index - first >= RANGE_TENSORS
        if full and index > first:
            ranges.append((first, index))
            first, total = index, 0
        total += size
    if first < len(sizes):
        ranges.append((first, len(sizes)))
    return ranges
