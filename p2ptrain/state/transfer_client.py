"""Moves named tensors from one device to another: the side that wants them (see `transfer_server`).

    manifest ──► what is here already, unchanged ──► taken as it is
             └─► ranges of at most RANGE_BYTES ────► read, checked, put where they belong

A range is several small tensors, or some chunks of a large one. Each is checked as it arrives; one
that does not fit its checksums is read once more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from zlib import crc32

from torch import Tensor

from p2ptrain.aio.tasks import task_scope
from p2ptrain.errors import ProtocolError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh, display_name
from p2ptrain.messages.calls import read_beside
from p2ptrain.messages.kinds import STATE_MANIFEST, STATE_READ
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.messages.snapshots import ManifestReply, RangeRequest, StateKey
from p2ptrain.model.wire.tensor_codec import Unpacking, pack
from p2ptrain.net.fields import LARGE, decoded, limited, part_of
from p2ptrain.net.message import Message, Priority
from p2ptrain.state.checksums import (
    CHUNK_BYTES,
    ChecksumMismatch,
    Digest,
    chunks,
    digests_beside,
    read_digest,
    split_digests,
)
from p2ptrain.state.served_state import ServedState
from p2ptrain.state.snapshot_store import StoredTensors
from p2ptrain.state.transfer_server import Check

log = get_logger(__name__)

RANGE_BYTES = 2 << 20

RANGE_TENSORS = 32

READS_IN_FLIGHT = 3

READ_TIMEOUT_SECONDS = 300.0

Pace: TypeAlias = Callable[[int], Awaitable[None]]
"""Awaited before each read with the bytes that have to be read still, its own included."""

Known: TypeAlias = Mapping[str, tuple[Tensor, Digest]]
"""Tensors that are here, by name, with their digests."""


async def at_once(left_bytes: int) -> None:
    """As fast as it goes."""


def _range_bytes() -> int:
    return RANGE_BYTES


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """What to read from which device.

    Attributes:
        timeout_seconds: for the manifest, and for each range.
        generation: of the plan that is prepared, where the state is on its way there for it.
        priority: of the tensors' bytes.
        range_bytes: most of the next read that is not one chunk; asked before each.
        reads_in_flight: at once.
    """

    peer: str
    job: str
    source: str
    first: int
    end: int
    timeout_seconds: float = READ_TIMEOUT_SECONDS
    generation: int = 0
    priority: Priority = Priority.BULK
    range_bytes: Callable[[], int] = _range_bytes
    reads_in_flight: int = READS_IN_FLIGHT

    def fields(self) -> dict[str, Any]:
        """As frame fields."""
        key = GenerationKey(self.job, self.generation)
        return StateKey(key, self.source, self.first, self.end).fields()


async def read_state(
    mesh: Mesh, request: TransferRequest, check: Check, known: Known | None = None
) -> dict[str, Tensor]:
    """Fetch every tensor of `request`; `known` as `TransferClient` takes it.

    Raises:
        ProtocolError: the other side offers what `check` refuses.
        ChecksumMismatch: bytes do not fit their checksums, nor did they when read again.
        LinkClosed, TimeoutError, PeerError: it is gone, too slow, or has no such state.
    """
    reading = TransferClient(mesh, check, known=known)
    await reading.read_from(request)
    return dict(reading.state().tensors)


class TransferClient:
    """A state on its way to this device, from one device or from several in turn."""

    def __init__(
        self,
        mesh: Mesh,
        check: Check,
        onward: ServedState | None = None,
        *,
        known: Known | None = None,
        slot: Mapping[str, Tensor] | None = None,
        pace: Pace = at_once,
        arrived: Callable[[int], None] = lambda _nbytes: None,
    ) -> None:
        """Read through `mesh`.

        Args:
            check: what tensors there may be.
            onward: receives what arrives, to hand it on.
            known: tensors to be taken instead of others with the same digest under the same name.
            slot: memory that may be written to, by name, where it suits.
            pace: when the next read may begin.
            arrived: called with the bytes of each read.
        """
        self._mesh = mesh
        self._check = check
        self._onward = onward
        self._known = known or {}
        self._slot = slot or {}
        self._pace = pace
        self._reported = arrived
        self._manifest = self._end = 0
        self._entries: list[_ManifestEntry] | None = None
        self._tensors: dict[str, Tensor] = {}
        self._digests: dict[str, Digest] = {}
        self._sums: dict[str, dict[int, int]] = {}  # of tensors under way: by chunk

    async def read_from(self, request: TransferRequest) -> None:
        """Fetch what is still missing. Raises as `read_state`; what has come by then is kept."""
        self._open(await self.ask_manifest(request))
        self._end = request.end
        missing = self._missing(request.range_bytes)
        left_bytes = sum(entry.unpacking.part_bytes for entry in self._absent())

        async def read_some() -> None:
            nonlocal left_bytes
            for span in missing:
                await self._pace(left_bytes)
                left_bytes -= span.nbytes
                await self._read_span(request, span)

        async with task_scope() as group:
            for _ in range(request.reads_in_flight):
                group.create_task(read_some())

    def state(self) -> StoredTensors:
        """Everything, in the order of the manifest, once `read_from` has returned."""
        names = [entry.name for entry in self._entries or ()]
        tensors, digests = self._tensors, self._digests
        return StoredTensors(
            self._end, {n: tensors[n] for n in names}, {n: digests[n] for n in names}
        )

    # -- the manifest ----------------------------------------------------------------------------

    async def ask_manifest(self, request: TransferRequest) -> list[_ManifestEntry]:
        """What the server has of what is wanted; the reads that follow are of this manifest."""
        for is_last in (False, True):
            waited_for = request.priority is Priority.BULK
            reply = await self._mesh.call(
                request.peer,
                Message(STATE_MANIFEST, request.fields()),
                timeout_seconds=request.timeout_seconds,
                priority=Priority.TENSOR if waited_for else request.priority,
                reply_parts=limited(LARGE.most_bytes),
            )
            blob = part_of(reply)
            self._manifest = crc32(blob)
            if self._manifest == ManifestReply.read(reply.fields).digest:
                return await read_beside(self._read_manifest, blob)
            self._complain(request.peer, "the manifest", give_up=is_last)
        raise AssertionError("unreachable")

    def _read_manifest(self, blob: bytes) -> list[_ManifestEntry]:
        manifest = decoded(blob, LARGE)
        if not isinstance(manifest, list):
            raise ProtocolError("a manifest is a list")
        return [self._entry(entry) for entry in manifest]

    def _entry(self, entry: object) -> _ManifestEntry:
        match entry:
            case [str(name), meta, digest]:
                unpacking = Unpacking(meta, self._check(name), slot=self._slot.get(name))
                known = None if digest is None else read_digest(digest, unpacking.part_bytes)
                return _ManifestEntry(name, meta, unpacking, known)
        raise ProtocolError("a manifest's entry is [name, meta, digest]")

    def _open(self, entries: list[_ManifestEntry]) -> None:
        if self._entries is not None:
            if [(e.name, e.meta) for e in self._entries] != [(e.name, e.meta) for e in entries]:
                raise ProtocolError("two devices offer different tensors as the same state")
            return
        self._entries = entries
        if self._onward is not None:
            known = {entry.name: entry.digest for entry in entries if entry.digest is not None}
            self._onward.begin([(entry.name, entry.meta) for entry in entries], known)
        for number, entry in enumerate(entries):
            here = self._known.get(entry.name)
            if here is None or not entry.is_like(*here):
                continue
            self._tensors[entry.name], self._digests[entry.name] = here
            if self._onward is not None:
                self._onward.arrived(number, [pack(here[0]).part])

    def _absent(self) -> list[_ManifestEntry]:
        return [entry for entry in self._entries or () if entry.name not in self._tensors]

    def _missing(self, range_bytes: Callable[[], int]) -> Iterator[_TransferRange]:
        absent = {entry.name for entry in self._absent()}
        entries = self._entries or ()
        sizes = [e.unpacking.part_bytes if e.name in absent else None for e in entries]
        return (span for span in spans_of(sizes, range_bytes) if not self._has(span))

    def _has(self, span: _TransferRange) -> bool:
        """Whether it is a piece that has come, of a tensor that is not whole yet."""
        if span.piece is None:
            return False
        here = self._sums.get((self._entries or [])[span.first].name, {})
        wanted = chunks(span.piece.start, span.piece.stop)
        return all(chunk in here for chunk in range(wanted.start, wanted.stop))

    # -- ranges ----------------------------------------------------------------------------------

    async def _read_span(self, request: TransferRequest, span: _TransferRange) -> None:
        entries = (self._entries or [])[span.first : span.end]
        buffers = [entry.unpacking.buffer[span.bytes_of(entry)] for entry in entries]
        plain = request.priority is Priority.REPLICA
        for is_last in (False, True):
            wanted = span.request(self._manifest, plain, is_last)
            reply = await self._mesh.call(
                request.peer,
                Message(STATE_READ, {**request.fields(), **wanted.fields()}),
                timeout_seconds=request.timeout_seconds,
                priority=request.priority,
                reply_parts=partial(_exactly, buffers),
            )
            reported = split_digests(reply.fields.get("digests"), [b.nbytes for b in buffers])
            wrong = None
            sums = await digests_beside(buffers)
            for entry, digest, found in zip(entries, reported, sums, strict=True):
                if found != entry.expected(span, digest):
                    wrong = entry.name
                    break
                self._arrived(entry, span, found)
            if wrong is None:
                break
            self._complain(request.peer, wrong, give_up=is_last)
        self._reported(span.nbytes)
        self._hand_on(span, entries)

    def _arrived(self, entry: _ManifestEntry, span: _TransferRange, found: Digest) -> None:
        if span.piece is None:
            self._digests[entry.name] = found
            self._tensors[entry.name] = entry.unpacking.tensor()
            return
        sums = self._sums.setdefault(entry.name, {})
        sums.update(enumerate(found, span.piece.start // CHUNK_BYTES))
        if len(sums) * CHUNK_BYTES >= entry.unpacking.part_bytes:
            self._digests[entry.name] = tuple(sums[chunk] for chunk in range(len(sums)))
            self._tensors[entry.name] = entry.unpacking.tensor()

    def _hand_on(self, span: _TransferRange, entries: Sequence[_ManifestEntry]) -> None:
        if self._onward is not None and all(entry.name in self._tensors for entry in entries):
            self._onward.arrived(span.first, [entry.unpacking.buffer for entry in entries])

    def _complain(self, peer: str, what: str, *, give_up: bool) -> None:
        name = display_name(self._mesh, peer)
        log.warning("damaged_on_arrival", what=what, peer=name, again=not give_up)
        if give_up:
            raise ChecksumMismatch(f"{what} from {name} does not fit its checksum, read twice")


@dataclass(frozen=True, slots=True)
class _ManifestEntry:
    """One tensor of a manifest."""

    name: str
    meta: Any
    unpacking: Unpacking
    digest: Digest | None

    def is_like(self, tensor: Tensor, digest: Digest) -> bool:
        """Whether `tensor`, which has that digest, is this one."""
        return digest == self.digest and pack(tensor).meta == self.meta

    def expected(self, span: _TransferRange, reported: Digest) -> Digest:
        """What the bytes of the span must have as their digest."""
        piece = span.bytes_of(self)
        return reported if self.digest is None else self.digest[chunks(piece.start, piece.stop)]


@dataclass(frozen=True, slots=True)
class _TransferRange:
    """Tensors [first, end), or some bytes of one."""

    first: int
    end: int
    nbytes: int
    piece: slice | None = None

    def bytes_of(self, entry: _ManifestEntry) -> slice:
        return self.piece or slice(0, entry.unpacking.part_bytes)

    def request(self, manifest: int, plain: bool, again: bool) -> RangeRequest:
        piece = self.piece or slice(None)
        return RangeRequest(manifest, self.first, self.end, piece.start, piece.stop, plain, again)


def _exactly(
    buffers: list[memoryview], peer: str, fields: Mapping[str, Any], sizes: Sequence[int]
) -> list[memoryview]:
    if [buffer.nbytes for buffer in buffers] != list(sizes):
        raise ProtocolError("the tensors that came are not those of the manifest")
    return buffers


def spans_of(
    sizes: Sequence[int | None], range_bytes: Callable[[], int]
) -> Iterator[_TransferRange]:
    """Consecutive ranges of at most `range_bytes` and RANGE_TENSORS, or pieces of one tensor.

    None: a tensor that is not wanted.
    """
    first = 0
    while first < len(sizes):
        size = sizes[first]
        if size is None:
            first += 1
            continue
        most = range_bytes()
        if size > max(most, CHUNK_BYTES):
            yield from _pieces(first, size, range_bytes)
            first += 1
            continue
        end, total = first + 1, size
        for following in sizes[end : first + RANGE_TENSORS]:
            if following is None or total + following > most:
                break
            end, total = end + 1, total + following
        yield _TransferRange(first, end, total)
        first = end


def _pieces(index: int, nbytes: int, range_bytes: Callable[[], int]) -> Iterator[_TransferRange]:
    """One large tensor in pieces of whole chunks."""
    begin = 0
    while begin < nbytes:
        step = max(range_bytes() // CHUNK_BYTES, 1) * CHUNK_BYTES
        stop = min(begin + step, nbytes)
        yield _TransferRange(index, index + 1, stop - begin, slice(begin, stop))
        begin = stop
