"""Moves named tensors from one device to another: the side that has them.

    reader                                    server
      |-- state.manifest {source, units,         |   which tensors, with their wire forms
      |                   number of the reading} ->|
      |<--- [[name, meta, digest], ...] ---------|   (digest: where the server knows it already)
      |-- state.read {from, to} ---------------->|   several at once, to keep the link full
      |<------- parts, their checksums ----------|

A server is the data holder, or a device that hands on what it is reading itself (`relay`): it
answers as soon as it has something. A tensor too large for one answer travels as ranges of whole
chunks, `state.read {from, to, begin, stop}`. A reader that is in no hurry asks for it `plain`, that
is, without trying compression. If data does not fit its checksums, a reader asks once more and says
so (`again`); the server then checks its own memory.

Names are `model:<state name>` and `optimizer:<parameter name>.<slot>`. A reader knows dtype and
shape of every model tensor from its description and refuses others; an optimizer slot has its
parameter's shape or is a scalar.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias
from zlib import crc32

import torch
from torch import Tensor

from p2ptrain.aio.threads import run_in_background
from p2ptrain.errors import PeerError, ProtocolError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.kinds import STATE_MANIFEST, STATE_READ
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.messages.transfers import ManifestReply, RangeRequest, StateKey
from p2ptrain.model.wire.tensor_codec import PackedTensor, copy_into, pack
from p2ptrain.net import cbor
from p2ptrain.net.message import Fields, Message, PartKind
from p2ptrain.state.checksums import (
    CHUNK_BYTES,
    ChecksumMismatch,
    Digest,
    chunks,
    digest_of,
    digests_beside,
)
from p2ptrain.state.relay import Entries, StateRelay, StateRelays
from p2ptrain.state.snapshot_store import Named

log = get_logger(__name__)

Source: TypeAlias = Callable[[int, int], Awaitable[Named]]
"""(first unit, end unit) -> the tensors by name; raises PeerError where they cannot be read."""

After: TypeAlias = Callable[[], Awaitable[None]]
"""What a reader waits for; raises PeerError where it will not come."""

Check: TypeAlias = Callable[[str], tuple[torch.dtype, tuple[int, ...]]]
"""Name -> the dtype and shape it must have; raises ProtocolError for an unknown name."""

KnownDigests: TypeAlias = Callable[[int, int], Mapping[str, Digest]]
"""(first unit, end unit) -> digests by name, of those tensors whose digest was taken before."""

_Key: TypeAlias = tuple[str, str, str, int, int, int]
"""(job, source, reader, number of its reading, first unit, end unit)."""

OPENED_LIMIT = 256
"""States that one device has opened and not read to the end; it reads a few at a time."""

RELAY = "relay"
"""The source that a device of a group offers to the next one while a generation is prepared."""

STAGE = "stage"
"""What a stage has now, its optimizer's part included."""

WEIGHTS = "weights"
"""The same without that part: what comes home in the end."""

AVERAGES = "averages"
"""The averages of the weights alone, where they are kept."""


async def at_once() -> None:
    """Nothing to wait for."""


def in_memory(tensors: Callable[[int, int], Named]) -> Source:
    """Of tensors that are there already."""

    async def source(first: int, end: int) -> Named:
        return tensors(first, end)

    return source


def none_known(first: int, end: int) -> Mapping[str, Digest]:
    """Of tensors that change: their checksums are taken as they leave."""
    return {}


def nothing() -> None:
    """No one to notify."""


@dataclass(frozen=True, slots=True)
class _OfferedState:
    tensors: Source
    after: After
    digests: KnownDigests
    on_damage: Callable[[], None]


class _Packed:
    """A state that is here."""

    def __init__(
        self, named: Named, digests: Mapping[str, Digest], on_damage: Callable[[], None]
    ) -> None:
        self.digests = digests
        self._on_damage = on_damage
        self._tensors: list[tuple[str, PackedTensor]] = [(n, pack(t)) for n, t in named.items()]

    async def entries(self) -> Entries:
        return [(name, tensor.meta) for name, tensor in self._tensors]

    async def parts(self, first: int, end: int) -> Sequence[memoryview]:
        return [tensor.part for _, tensor in self._tensors[first:end]]

    async def look(self, first: int, end: int) -> None:
        for name, tensor in self._tensors[first:end]:
            known = self.digests.get(name)
            if (
                known is not None
                and await run_in_background(partial(digest_of, tensor.part)) != known
            ):
                log.error("damaged_in_memory", tensor=name)
                self._on_damage()
                raise ChecksumMismatch(f"{name} has changed in this device's memory")

    def served(self) -> None:
        self._tensors = []


class TransferServer:
    """Serves named tensors of this device to the members of a job.

    Attributes:
        relays: what this device hands on while it reads it.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.relays = StateRelays()
        self._sources: dict[tuple[str, str], _OfferedState] = {}
        self._whole: dict[tuple[str, str], _OfferedState] = {}
        self._opened: dict[_Key, _Opened] = {}
        mesh.route(STATE_MANIFEST, self.answer_manifest)
        mesh.route(STATE_READ, self.answer_read)

    def offer(
        self,
        job: str,
        source: str,
        tensors: Source,
        after: After = at_once,
        *,
        digests: KnownDigests = none_known,
        on_damage: Callable[[], None] = nothing,
    ) -> None:
        """Serve `tensors` under (job, source) until `withdraw`; `after` is awaited each time.

        Args:
            digests: what is known of the tensors' digests, which then do not change any more.
            on_damage: called when data here does not fit such a digest any more.
        """
        self._sources[job, source] = _OfferedState(tensors, after, digests, on_damage)

    def hold(
        self, job: str, source: str, tensors: Source, digests: KnownDigests = none_known
    ) -> None:
        """Have a copy of the whole model, served where nothing else is offered as `source`."""
        self._whole[job, source] = _OfferedState(tensors, at_once, digests, nothing)

    def let_go(self, job: str, source: str) -> None:
        """There is no such copy any more."""
        self._whole.pop((job, source), None)

    async def whole(self, job: str, source: str, first: int, end: int) -> Named | None:
        """Of such a copy the tensors of units [first, end); None where there is none.

        Raises:
            PeerError: it cannot be read.
        """
        whole = self._whole.get((job, source))
        return None if whole is None else await whole.tensors(first, end)

    def withdraw(self, job: str) -> None:
        """Serve nothing of this job any more."""
        self._sources = {k: v for k, v in self._sources.items() if k[0] != job}
        self._whole = {k: v for k, v in self._whole.items() if k[0] != job}
        self._opened = {k: v for k, v in self._opened.items() if k[0] != job}

    def retract(self, job: str, sources: Collection[str]) -> None:
        """Serve these sources of the job no more."""
        gone = {(job, source) for source in sources}
        self._sources = {k: v for k, v in self._sources.items() if k not in gone}
        self._opened = {k: v for k, v in self._opened.items() if k[:2] not in gone}

    async def local(self, job: str, source: str, first: int, end: int) -> dict[str, Tensor]:
        """The same tensors for this device itself, copied; laid out as they are."""
        named = await self.here(job, source, first, end)
        return {name: copy_into(None, tensor) for name, tensor in named.items()}

    async def here(self, job: str, source: str, first: int, end: int) -> Named:
        """The same tensors themselves."""
        offer = self._source(job, source)
        await offer.after()
        return await offer.tensors(first, end)

    async def answer_manifest(self, peer: str, message: Message) -> Message:
        """Which tensors there are, in which sizes."""
        key = self._key(peer, message.fields)
        served = await self._serve(message.fields, key)
        entries, digests = await served.entries(), served.digests
        self._open(key, _Opened(served, tuple(name for name, _ in entries)))
        blob = cbor.dumps([[name, meta, _listed(digests.get(name))] for name, meta in entries])
        return Message(STATE_MANIFEST, ManifestReply(crc32(blob)).fields(), (memoryview(blob),))

    def _open(self, key: _Key, opened: _Opened) -> None:
        """Of a device that opens state after state and reads none, the oldest are forgotten."""
        self._opened.pop(key, None)
        self._opened[key] = opened
        theirs = [other for other in self._opened if other[2] == key[2]]
        if len(theirs) > OPENED_LIMIT:
            del self._opened[theirs[0]]

    async def answer_read(self, peer: str, message: Message) -> Message:
        """A range of them."""
        key, wanted = self._key(peer, message.fields), RangeRequest.read(message.fields)
        opened = self._opened.get(key)
        if opened is None:
            raise ProtocolError("state.read without a manifest")
        first, end = wanted.first, wanted.end
        if end > len(opened.names):
            raise ProtocolError(f"tensors {first} to {end} of {len(opened.names)}")
        if wanted.again:
            await opened.served.look(first, end)
        found = await opened.served.parts(first, end)
        pieces = _pieces(wanted, found)
        parts = tuple(part[piece] for part, piece in zip(found, pieces, strict=True))
        known = [opened.served.digests.get(name) for name in opened.names[first:end]]
        unknown = [part for part, digest in zip(parts, known, strict=True) if digest is None]
        taken = iter(await digests_beside(unknown))
        sums: list[int] = []
        for digest, piece in zip(known, pieces, strict=True):
            sums += next(taken) if digest is None else digest[chunks(piece.start, piece.stop)]
        is_whole = not pieces or pieces[-1].stop == found[-1].nbytes
        if end == len(opened.names) and is_whole:
            self._opened.pop(key, None)
            opened.served.served()
        kind = PartKind.OPAQUE if wanted.plain else PartKind.WEIGHT
        return Message(STATE_READ, {"digests": sums}, parts, (kind,) * len(parts))

    async def _serve(self, fields: Fields, key: _Key) -> _Packed | StateRelay:
        job, source, _, _, first, end = key
        if source == RELAY:
            return self.relays.get(GenerationKey.read(fields), first, end)
        named, offer = await self.here(job, source, first, end), self._source(job, source)
        return _Packed(named, offer.digests(first, end), offer.on_damage)

    def _source(self, job: str, source: str) -> _OfferedState:
        offer = self._sources.get((job, source)) or self._whole.get((job, source))
        if offer is None:
            raise PeerError(f"this device has no state {source!r} of that job")
        return offer

    @staticmethod
    def _key(peer: str, fields: Fields) -> _Key:
        state = StateKey.read(fields)
        return state.key.job, state.source, peer, state.reading, state.first, state.end


@dataclass(frozen=True, slots=True)
class _Opened:
    served: _Packed | StateRelay
    names: Sequence[str]


def _pieces(wanted: RangeRequest, parts: Sequence[memoryview]) -> list[slice]:
    """Which bytes of each part are asked for: all, or whole chunks of a part alone."""
    begin, end = wanted.begin, wanted.stop
    if begin is None or end is None:
        return [slice(0, part.nbytes) for part in parts]
    if len(parts) != 1:
        raise ProtocolError("a piece is of one tensor")
    if not begin <= end <= parts[0].nbytes:
        raise ProtocolError(f"bytes {begin} to {end} of {parts[0].nbytes}")
    if begin % CHUNK_BYTES or (end % CHUNK_BYTES and end != parts[0].nbytes):
        raise ProtocolError("a piece is of whole chunks")
    return [slice(begin, end)]


def _listed(digest: Digest | None) -> list[int] | None:
    return None if digest is None else list(digest)
