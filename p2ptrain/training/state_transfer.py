"""Moving named tensors from one device to another: a manifest first, then ranges of it.

    reader                                    server
      |-- state.manifest {source, units} ------->|   which tensors, with their wire forms
      |<------------- [[name, meta], ...] -------|
      |-- state.read {first, end} -------------->|   several at once, to keep the link full
      |<------------- parts ---------------------|

Names are `model:<state name>` and `optimizer:<parameter name>.<slot>`. A reader knows dtype and
shape of every model tensor from its description and refuses others; an optimizer slot has its
parameter's shape or is a scalar.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from p2ptrain.errors import PeerError, ProtocolError
from p2ptrain.mesh.interface import Mesh
from p2ptrain.model.wire import PackedTensor, Unpacking, pack
from p2ptrain.net import cbor
from p2ptrain.net.message import Fields, Message, PartKind, Priority
from p2ptrain.training.parts import limited
from p2ptrain.training.protocol import (
    BLOB_LIMIT_BYTES,
    STATE_MANIFEST,
    STATE_READ,
    integer,
    text,
)
from p2ptrain.training.scope import task_scope

Named: TypeAlias = Mapping[str, Tensor]
Source: TypeAlias = Callable[[int, int], Named]
"""(first unit, end unit) -> the tensors by name."""
Check: TypeAlias = Callable[[str], tuple[torch.dtype, tuple[int, ...]]]
"""Name -> the dtype and shape it must have; raises ProtocolError for an unknown name."""

RANGE_BYTES = 2 << 20
RANGE_TENSORS = 32
READS_IN_FLIGHT = 3
READ_TIMEOUT_SECONDS = 300.0


class StateServer:
    """Serves named tensors of this device to the members of a job."""

    def __init__(self, mesh: Mesh) -> None:
        self._sources: dict[tuple[str, str], Source] = {}
        self._opened: dict[tuple[str, str, str, int, int], list[tuple[str, PackedTensor]]] = {}
        mesh.route(STATE_MANIFEST, self._manifest)
        mesh.route(STATE_READ, self._read)

    def offer(self, job: str, source: str, tensors: Source) -> None:
        """Serve `tensors` under (job, source) until `withdraw`."""
        self._sources[job, source] = tensors

    def withdraw(self, job: str, *, keep: Collection[str] = ()) -> None:
        """Serve nothing of this job any more, but the sources in `keep`."""
        self._sources = {k: v for k, v in self._sources.items() if k[0] != job or k[1] in keep}
        self._opened = {k: v for k, v in self._opened.items() if k[0] != job or k[1] in keep}

    def local(self, job: str, source: str, first: int, end: int) -> dict[str, Tensor]:
        """The same tensors for this device itself, copied."""
        named = self._source(job, source)(first, end)
        return {name: tensor.clone() for name, tensor in named.items()}

    async def _manifest(self, peer: str, message: Message) -> Message:
        key = self._key(peer, message.fields)
        named = self._source(key[0], key[1])(key[3], key[4])
        packed = [(name, pack(tensor)) for name, tensor in named.items()]
        self._opened[key] = packed
        blob = cbor.dumps([[name, item.meta] for name, item in packed])
        return Message(STATE_MANIFEST, {}, (memoryview(blob),))

    async def _read(self, peer: str, message: Message) -> Message:
        opened = self._opened.get(self._key(peer, message.fields))
        if opened is None:
            raise ProtocolError("state.read without a manifest")
        first = integer(message.fields, "from", 0, len(opened))
        end = integer(message.fields, "to", first, len(opened))
        if end == len(opened):
            del self._opened[self._key(peer, message.fields)]
        parts = tuple(item.part for _, item in opened[first:end])
        return Message(STATE_READ, {}, parts, (PartKind.WEIGHT,) * len(parts))

    def _source(self, job: str, source: str) -> Source:
        if (job, source) not in self._sources:
            raise PeerError(f"this device has no state {source!r} of that job")
        return self._sources[job, source]

    @staticmethod
    def _key(peer: str, fields: Fields) -> tuple[str, str, str, int, int]:
        return (
            text(fields, "job", 64),
            text(fields, "source", 64),
            peer,
            integer(fields, "first"),
            integer(fields, "end"),
        )


@dataclass(frozen=True, slots=True)
class StateRequest:
    """What to read from whom."""

    peer: str
    job: str
    source: str
    first: int
    end: int

    def fields(self) -> dict[str, Any]:
        """As frame fields."""
        return {"job": self.job, "source": self.source, "first": self.first, "end": self.end}


async def read_state(mesh: Mesh, request: StateRequest, check: Check) -> dict[str, Tensor]:
    """Fetch every tensor of `request`, at bulk priority.

    Raises:
        ProtocolError: the other side offers what `check` refuses.
        LinkClosed, TimeoutError, PeerError: it is gone, too slow, or has no such state.
    """
    reply = await mesh.call(
        request.peer,
        Message(STATE_MANIFEST, request.fields()),
        timeout_seconds=READ_TIMEOUT_SECONDS,
        priority=Priority.TENSOR,
        reply_parts=limited(BLOB_LIMIT_BYTES),
    )
    entries = _check_manifest(bytes(reply.parts[0]), check)
    result: dict[str, Tensor] = {}
    gate = asyncio.Semaphore(READS_IN_FLIGHT)

    async def read(first: int, end: int) -> None:
        async with gate:
            result.update(await _read_range(mesh, request, entries, (first, end)))

    # The last range is read alone: it tells the server that the manifest has served.
    *ranges, last = _ranges([_entry_bytes(*expected) for _, _, expected in entries]) or [(0, 0)]
    async with task_scope() as group:
        for first, end in ranges:
            group.create_task(read(first, end))
    await read(*last)
    return {name: result[name] for name, _, _ in entries}


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


async def _read_range(
    mesh: Mesh, request: StateRequest, entries: Sequence[_Entry], limits: tuple[int, int]
) -> dict[str, Tensor]:
    first, end = limits
    received = [Unpacking(meta, expected) for _, meta, expected in entries[first:end]]
    await mesh.call(
        request.peer,
        Message(STATE_READ, {**request.fields(), "from": first, "to": end}),
        timeout_seconds=READ_TIMEOUT_SECONDS,
        priority=Priority.BULK,
        reply_parts=partial(_exactly, [item.buffer for item in received]),
    )
    names = [name for name, _, _ in entries[first:end]]
    return {name: item.tensor() for name, item in zip(names, received, strict=True)}


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
