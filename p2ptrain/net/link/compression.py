"""Compression on a link: decides by measurement whether and how, and does it beside the event loop.

Sending raw costs 1/link seconds a raw byte; compressed, it costs

    1/compression speed + ratio/link + 1/decompression speed      (ratio = wire bytes / raw bytes)

as both devices' processors also have a model to train. The cheapest way is taken where it is
cheaper by a margin. Activations with many zeros shrink by LZ4 as they are, dense ones a little
where their bytes are sorted first, many not at all (docs/user/wire.md), so only measuring decides.
Ways that are not in use are tried on one block at intervals, ever less often while that does not
pay; while one is in use every block is a measurement, so a change shows within a few blocks.

LZ4 and numpy release the GIL, so blocks are compressed in a thread while the ones before them are
sent. A message has at most one job at a time, so its blocks stay in order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

from p2ptrain.net.encoder import CompressionJob, OutgoingMessage
from p2ptrain.net.frame import BLOCK_BYTES, Block, Codec, encode_block
from p2ptrain.net.link.send_queue import Outbox
from p2ptrain.net.message import PartKind

WAYS = (Codec.LZ4, Codec.SHUFFLED)

OTHER_LINK = 2.0
"""A rate that changes so many times at once is another link's: everything may pay now."""


@dataclass(frozen=True, slots=True)
class ChooserSettings:
    """When to measure and when to switch.

    Attributes:
        enabled: False sends everything raw.
        least_part_bytes: smaller parts go raw: their share of the traffic is not worth a thread.
        sample_seconds: a way that is not in use is tried this often at first. Shorter: notices
            sooner that it pays; longer: less processor time.
        sample_limit_seconds: each trial without a gain doubles the time to the next, up to this.
            Longer: less processor time; shorter: tensors that begin to shrink are noticed sooner.
        gain_to_start, gain_to_stop: raw cost / compressed cost above which compression starts,
            and below which it stops; apart, so that it does not flutter.
        newest_weight: of the latest measurement in an estimate. Larger: follows faster.
        decompression_advantage: how many times faster than packing the other side unpacks LZ4 as
            it is, where its speed is unknown; sorted bytes are unpacked no faster than packed.
    """

    enabled: bool = True
    least_part_bytes: int = 8 * 1024
    sample_seconds: float = 1.0
    sample_limit_seconds: float = 16.0
    gain_to_start: float = 1.08
    gain_to_stop: float = 1.02
    newest_weight: float = 0.4
    decompression_advantage: float = 3.0


@dataclass(frozen=True, slots=True)
class Compressed:
    """Blocks that were compressed, in `seconds` of one thread."""

    blocks: tuple[Block, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """What to do with a part, and why.

    Attributes:
        codec: how it travels.
        samples: compress one of its blocks in these ways too, and report it.
        reason: for logs and tests.
    """

    codec: Codec
    samples: tuple[Codec, ...]
    reason: str


@dataclass(slots=True)
class _CodecEstimate:
    """Estimates for one kind of tensor and one codec; None before the first measurement."""

    ratio: float | None = None
    bytes_per_s: float | None = None
    sampled_at: float | None = None
    in_vain: int = 0  # trials in a row that showed no gain


@dataclass(slots=True)
class _CodecHistory:
    ways: dict[Codec, _CodecEstimate] = field(
        default_factory=lambda: {codec: _CodecEstimate() for codec in WAYS}
    )
    in_use: Codec = Codec.RAW


@dataclass(slots=True)
class CompressionChooser:
    """Decides for one direction of one link. Pure: times and measurements are arguments."""

    settings: ChooserSettings = field(default_factory=ChooserSettings)
    link_bytes_per_s: float | None = None
    _kinds: dict[PartKind, _CodecHistory] = field(default_factory=dict)

    def choose(self, kind: PartKind, part_bytes: int, now: float) -> CodecChoice:
        """How a part of `kind` and `part_bytes` raw bytes goes out at time `now` (seconds)."""
        settings = self.settings
        if not settings.enabled or kind is PartKind.OPAQUE:
            return CodecChoice(Codec.RAW, (), "never compressed")
        if part_bytes < settings.least_part_bytes:
            return CodecChoice(Codec.RAW, (), "too small to matter")
        if self.link_bytes_per_s is None:
            return CodecChoice(Codec.RAW, (), "the link has not been the limit yet")
        state = self._kinds.setdefault(kind, _CodecHistory())
        gains = {codec: self._gain(codec, way) for codec, way in state.ways.items()}
        best = max(gains, key=lambda codec: gains[codec])
        bar = settings.gain_to_start if state.in_use is Codec.RAW else settings.gain_to_stop
        pays = gains[best] >= bar
        state.in_use = best if pays else Codec.RAW
        reason = f"{best.name}: gain {gains[best]:.2f} is {'at least' if pays else 'below'} {bar}"
        return CodecChoice(state.in_use, self._due(state, now), reason)

    def observe_compression(self, kind: PartKind, codec: Codec, measured: Compressed) -> None:
        """Blocks of `kind` were compressed by `codec`."""
        state = self._kinds.setdefault(kind, _CodecHistory())
        way = state.ways[codec]
        raw_bytes = sum(block.raw_bytes for block in measured.blocks)
        wire_bytes = sum(block.wire_bytes for block in measured.blocks)
        way.ratio = self._blend(way.ratio, wire_bytes / raw_bytes)
        speed = raw_bytes / max(measured.seconds, 1e-9)
        way.bytes_per_s = self._blend(way.bytes_per_s, speed)
        pays = self._gain(codec, way) >= self.settings.gain_to_start
        way.in_vain = 0 if pays or codec is state.in_use else way.in_vain + 1

    def observe_link(self, bytes_per_s: float | None) -> None:
        """What the link takes on the wire; None while it has never been the limit."""
        old, self.link_bytes_per_s = self.link_bytes_per_s, bytes_per_s
        if old and bytes_per_s and not 1 / OTHER_LINK < bytes_per_s / old < OTHER_LINK:
            for way in (way for kind in self._kinds.values() for way in kind.ways.values()):
                way.in_vain = 0

    def ratio(self, kind: PartKind, codec: Codec = Codec.LZ4) -> float | None:
        """Measured wire bytes / raw bytes of `kind`, if any."""
        return self._kinds[kind].ways[codec].ratio if kind in self._kinds else None

    def _due(self, state: _CodecHistory, now: float) -> tuple[Codec, ...]:
        """Ways to try now: those not in use whose last trial is long ago."""
        due = tuple(
            codec
            for codec, way in state.ways.items()
            if codec is not state.in_use
            and (way.sampled_at is None or now - way.sampled_at >= self._pause_seconds(way))
        )
        for codec in due:
            state.ways[codec].sampled_at = now
        return due

    def _pause_seconds(self, way: _CodecEstimate) -> float:
        settings = self.settings
        doublings = min(max(way.in_vain - 1, 0), 16)
        return min(settings.sample_seconds * 2.0**doublings, settings.sample_limit_seconds)

    def _gain(self, codec: Codec, way: _CodecEstimate) -> float:
        """Raw cost / compressed cost of a byte; 0 before a measurement."""
        link = self.link_bytes_per_s
        if link is None or way.ratio is None or way.bytes_per_s is None:
            return 0.0
        advantage = self.settings.decompression_advantage if codec is Codec.LZ4 else 1.0
        unpack = way.bytes_per_s * advantage
        return (1 / link) / (1 / way.bytes_per_s + way.ratio / link + 1 / unpack)

    def _blend(self, old: float | None, newest: float) -> float:
        return newest if old is None else old + self.settings.newest_weight * (newest - old)


class LinkCompression:
    """Runs a link's compression.

    Args:
        chooser: decides; owned by this object.
        executor: threads to compress in, shared between links; None compresses in place.
        clock: seconds of the event loop's clock, for the chooser.
        ready: called when blocks are ready to be sent, or with the reason why they never will be.
    """

    def __init__(
        self,
        chooser: CompressionChooser,
        executor: Executor | None,
        clock: Callable[[], float],
        ready: Callable[[BaseException | None], None],
    ) -> None:
        self.chooser = chooser
        self._executor = executor
        self._clock = clock
        self._ready = ready
        self._running: set[asyncio.Future[Compressed]] = set()

    def choose(self, kind: PartKind, part: memoryview) -> Codec:
        """How `part` travels; sometimes measures a block of it on the way."""
        if kind is PartKind.OPAQUE or self.chooser.link_bytes_per_s is None:
            return Codec.RAW  # as the chooser would say, and most messages are so
        choice = self.chooser.choose(kind, part.nbytes, self._clock())
        for codec in choice.samples:
            self._sample(kind, part[:BLOCK_BYTES], codec)
        return choice.codec

    def _sample(self, kind: PartKind, block: memoryview, codec: Codec) -> None:
        self._run((block,), codec, partial(self.chooser.observe_compression, kind, codec))

    def start_jobs(self, outbox: Outbox) -> None:
        """Compress what the messages in transit need next."""
        for message, job in outbox.compression_jobs():
            self._start(message, job)

    def cancel(self) -> None:
        """Forget the jobs under way: the link is gone."""
        for future in tuple(self._running):
            future.cancel()

    def _start(self, message: OutgoingMessage, job: CompressionJob) -> None:
        def finish(result: Compressed) -> None:
            self.chooser.observe_compression(job.kind, job.codec, result)
            message.compressed(result.blocks)
            if self._executor is not None:
                self._ready(None)

        self._run(job.blocks, job.codec, finish)

    def _run(
        self, blocks: tuple[memoryview, ...], codec: Codec, finish: Callable[[Compressed], None]
    ) -> None:
        if self._executor is None:
            finish(_compress(blocks, codec))
            return
        loop = asyncio.get_running_loop()
        try:
            future = loop.run_in_executor(self._executor, _compress, blocks, codec)
        except RuntimeError as error:  # the executor was shut down before its links
            self._ready(error)
            return
        self._running.add(future)

        def done(future: asyncio.Future[Compressed]) -> None:
            self._running.discard(future)
            if future.cancelled():
                return
            if error := future.exception():
                self._ready(error)
            else:
                finish(future.result())

        future.add_done_callback(done)


def _compress(blocks: tuple[memoryview, ...], codec: Codec) -> Compressed:
    begin = time.perf_counter()
    encoded = tuple(encode_block(block, codec) for block in blocks)
    return Compressed(encoded, time.perf_counter() - begin)
