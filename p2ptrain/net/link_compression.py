"""Compression of one link: the chooser's decisions, carried out beside the event loop.

LZ4 and numpy release the GIL, so blocks are compressed in a thread while the ones before them are
sent. A message has at most one job out, so its blocks stay in order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from p2ptrain.net.blocks import BLOCK_BYTES, Block, encode_block
from p2ptrain.net.compression import Compressed, CompressionChooser
from p2ptrain.net.frame import Codec
from p2ptrain.net.message import PartKind
from p2ptrain.net.outbox import Outbox
from p2ptrain.net.outgoing import CompressionJob, OutgoingMessage


@dataclass(frozen=True, slots=True)
class _Result:
    blocks: tuple[Block, ...]
    seconds: float


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
        self._running: set[asyncio.Future[_Result]] = set()

    def choose(self, kind: PartKind, part: memoryview) -> Codec:
        """How `part` travels; sometimes measures a block of it on the way."""
        if kind is PartKind.OPAQUE or self.chooser.link_bytes_per_s is None:
            return Codec.RAW  # as the chooser would say, and most messages are so
        choice = self.chooser.choose(kind, part.nbytes, self._clock())
        for codec in choice.samples:
            self._sample(kind, part[:BLOCK_BYTES], codec)
        return choice.codec

    def _sample(self, kind: PartKind, block: memoryview, codec: Codec) -> None:
        self._run((block,), codec, lambda result: self._observe(kind, codec, result))

    def start_jobs(self, outbox: Outbox) -> None:
        """Compress what the messages in transit need next."""
        for message, job in outbox.compression_jobs():
            self._start(message, job)

    def cancel(self) -> None:
        """Forget the jobs under way: the link is gone."""
        for future in tuple(self._running):
            future.cancel()

    def _start(self, message: OutgoingMessage, job: CompressionJob) -> None:
        def finish(result: _Result) -> None:
            self._observe(job.kind, job.codec, result)
            message.compressed(result.blocks)
            if self._executor is not None:
                self._ready(None)

        self._run(job.blocks, job.codec, finish)

    def _observe(self, kind: PartKind, codec: Codec, result: _Result) -> None:
        raw_bytes = sum(block.raw_bytes for block in result.blocks)
        wire_bytes = sum(block.wire_bytes for block in result.blocks)
        compressed = Compressed(raw_bytes, wire_bytes, result.seconds)
        self.chooser.observe_compression(kind, codec, compressed)

    def _run(
        self, blocks: tuple[memoryview, ...], codec: Codec, finish: Callable[[_Result], None]
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

        def done(future: asyncio.Future[_Result]) -> None:
            self._running.discard(future)
            if future.cancelled():
                return
            if error := future.exception():
                self._ready(error)
            else:
                finish(future.result())

        future.add_done_callback(done)


def _compress(blocks: tuple[memoryview, ...], codec: Codec) -> _Result:
    begin = time.perf_counter()
    encoded = tuple(encode_block(block, codec) for block in blocks)
    return _Result(encoded, time.perf_counter() - begin)
