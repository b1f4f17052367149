"""Moves named tensors from one device to another: the side that has them.

    reader                                    server
      |-- state.manifest {source, units} ------->|   which tensors, with their wire forms
      |<--- [[name, meta, digest], ...] ---------|   (digest: where the server knows it already)
      |-- state.read {manifest, from, to} ------>|   several at once, to keep the link full
      |<------- parts, their checksums ----------|

What a state is made of may lie in several places of this device: in the stages that were trained
here, in snapshots, in what was fetched, in whole copies at the holder. `read` puts it together, for
this device as for others; what is only arriving can be read too (`served_state`). A tensor too
large for one answer travels as ranges of whole chunks, `state.read {from, to, begin, stop}`. A
reader that is in no hurry asks for it `plain`, that is, without trying compression. If data does
not fit its checksums, a reader asks once more and says so (`again`); the server then checks its own
memory.

Names are `model:<state name>` and `optimizer:<parameter name>.<slot>`. A reader knows dtype and
shape of every model tensor from its description and refuses others; an optimizer slot has its
parameter's shape or is a scalar.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias
from zlib import crc32

import torch

from p2ptrain.errors import PeerError, ProtocolError
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.kinds import STATE_MANIFEST, STATE_READ
from p2ptrain.messages.snapshots import ManifestReply, RangeRequest, StateKey
from p2ptrain.net import cbor
from p2ptrain.net.message import Message, PartKind
from p2ptrain.recovery.version import Version
from p2ptrain.state.checksums import CHUNK_BYTES, Digest, chunks, digests_beside
from p2ptrain.state.served_state import ArrivingStates, ServedState
from p2ptrain.state.snapshot_store import StoredTensors

Source: TypeAlias = Callable[[str, int, int], Awaitable[StoredTensors | None]]
"""(state, first unit, end unit) -> of these as many from the first on as lie together; None = it
has not the first. Raises PeerError where they cannot be read."""

WholeCopy: TypeAlias = Callable[[int, int], Awaitable[StoredTensors]]
"""(first unit, end unit) -> their tensors; raises PeerError where they cannot be read."""

Check: TypeAlias = Callable[[str], tuple[torch.dtype, tuple[int, ...]]]
"""Name -> the dtype and shape it must have; raises ProtocolError for an unknown name."""

OPENED_LIMIT = 32
"""States that are open for their readers; another one is looked up again at each read."""

STAGE = "stage"
"""What a stage has now, its optimizer's part included."""

WEIGHTS = "weights"
"""The same without that part: what comes home in the end."""

AVERAGES = "averages"
"""The averages of the weights alone, where they are kept."""


def version_source(version: Version) -> str:
    """What a state of that version is asked for as."""
    return f"version:{version.step}:{version.computed}"


def version_of(source: str) -> Version | None:
    """The version that is asked for so; None = it is no version."""
    match source.split(":"):
        case ["version", step, computed] if step.isdecimal() and computed.isdecimal():
            return Version(int(step), int(computed))
    return None


class TransferServer:
    """What this device has of jobs, for itself and for the members of each.

    Attributes:
        arriving: what can be read while it arrives.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.arriving = ArrivingStates()
        self._mesh = mesh
        self._worked_for: tuple[str, Source, Callable[[str], None]] | None = None
        self._whole: dict[tuple[str, Version], WholeCopy] = {}
        self._opened: dict[tuple[StateKey, int], ServedState] = {}  # by the manifest's CRC-32 too
        mesh.route(STATE_MANIFEST, self.answer_manifest)
        mesh.route(STATE_READ, self.answer_read)

    def serve(self, job: str, source: Source, on_damage: Callable[[str], None]) -> None:
        """Read `source` first: it has what this device has as one that works for the job.

        Args:
            on_damage: called with a state of which something does not fit its digest any more.
        """
        self._worked_for = (job, source, on_damage)
        self.reopen(job)

    def hold(self, job: str, version: Version, whole: WholeCopy) -> None:
        """Have a copy of the whole model, read where nothing else is here of that version."""
        self._whole[job, version] = whole

    def let_go(self, job: str, version: Version) -> None:
        """There is no such copy any more."""
        self._whole.pop((job, version), None)
        self.reopen(job)

    def held(self, job: str) -> tuple[Version, ...]:
        """Versions of which there are such copies."""
        return tuple(version for of, version in self._whole if of == job)

    def withdraw(self, job: str) -> None:
        """The holder has no copy of this job any more."""
        self._whole = {k: v for k, v in self._whole.items() if k[0] != job}
        self.reopen(job)

    def reopen(self, job: str) -> None:
        """What is here has changed: at the next read it is looked up again."""
        self._opened = {k: v for k, v in self._opened.items() if k[0].key.job != job}

    async def read(self, job: str, source: str, first: int, end: int) -> StoredTensors:
        """The tensors of units [first, end) of a state, from wherever they are here.

        Raises:
            PeerError: some are not here.
        """
        found = StoredTensors(first, {}, {})
        while found.end < end:
            found = found.joined(await self._part(job, source, found.end, end))
        return found

    async def _part(self, job: str, source: str, first: int, end: int) -> StoredTensors:
        if self._worked_for is not None and self._worked_for[0] == job:
            part = await self._worked_for[1](source, first, end)
            if part is not None:
                return part
        version = version_of(source)
        whole = None if version is None else self._whole.get((job, version))
        if whole is None:
            raise PeerError(f"{self._mesh.name} has no state {source!r} of layer {first}")
        return await whole(first, end)

    async def answer_manifest(self, peer: str, message: Message) -> Message:
        """Which tensors there are, in which sizes."""
        key = StateKey.read(message.fields)
        blob = await self._open(key)
        return Message(STATE_MANIFEST, ManifestReply(crc32(blob)).fields(), (memoryview(blob),))

    async def _open(self, key: StateKey) -> bytes:
        """Look a state up, and keep what was found for its readers; returns the manifest."""
        served = await self._served(key)
        entries, digests = await served.entries(), served.digests
        blob = cbor.dumps([[name, meta, _listed(digests.get(name))] for name, meta in entries])
        self._opened.pop((key, crc32(blob)), None)
        self._opened[key, crc32(blob)] = served
        if len(self._opened) > OPENED_LIMIT:
            del self._opened[next(iter(self._opened))]
        return blob

    async def answer_read(self, peer: str, message: Message) -> Message:
        """A range of them."""
        key, wanted = StateKey.read(message.fields), RangeRequest.read(message.fields)
        if (key, wanted.manifest) not in self._opened:
            await self._open(key)
        served = self._opened.get((key, wanted.manifest))
        if served is None:
            raise PeerError(f"{key.source!r} is not what its manifest said any more")
        entries, (first, end) = await served.entries(), (wanted.first, wanted.end)
        if end > len(entries):
            raise ProtocolError(f"tensors {first} to {end} of {len(entries)}")
        if wanted.again:
            await served.look(first, end)
        found = await served.parts(first, end)
        pieces = _pieces(wanted, found)
        parts = tuple(part[piece] for part, piece in zip(found, pieces, strict=True))
        known = [served.digests.get(name) for name, _ in entries[first:end]]
        unknown = [part for part, digest in zip(parts, known, strict=True) if digest is None]
        taken = iter(await digests_beside(unknown))
        sums: list[int] = []
        for digest, piece in zip(known, pieces, strict=True):
            sums += next(taken) if digest is None else digest[chunks(piece.start, piece.stop)]
        if end == len(entries) and pieces[-1:] and pieces[-1].stop == found[-1].nbytes:
            self._opened.pop((key, wanted.manifest), None)  # no reader needs it much longer
        kind = PartKind.OPAQUE if wanted.plain else PartKind.WEIGHT
        return Message(STATE_READ, {"digests": sums}, parts, (kind,) * len(parts))

    async def _served(self, key: StateKey) -> ServedState:
        job, units = key.key.job, (key.first, key.end)
        if key.key.generation:  # the reader knows that it is on its way here
            return self.arriving.get(key.key, *units)
        on_damage = partial(self._damaged, job, key.source)
        return ServedState.whole(await self.read(job, key.source, *units), on_damage)

    def _damaged(self, job: str, source: str) -> None:
        if self._worked_for is not None and self._worked_for[0] == job:
            self._worked_for[2](source)


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
