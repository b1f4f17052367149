"""Fetches what the devices of a job have recorded, and in the end writes it as one trace file.

    holder                                    device
      |-- trace.spans, none ------------------->|   urgent: what time is it there?
      |<------------------------ its clock -----|
      |-- trace.spans, some ------------------->|   before copies only: it records from now on
      |<------------------------ spans ---------|

Of each device the newest spans are kept, as they came: a day of training leaves its last minutes.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from p2ptrain._version import __version__
from p2ptrain.aio.tasks import run_in_background, task_scope
from p2ptrain.errors import Error, TrainingError
from p2ptrain.files import write_whole
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh, display_name
from p2ptrain.messages.calls import read_part
from p2ptrain.messages.kinds import SPANS
from p2ptrain.messages.spans import MOST_SPANS, SpanColumns, SpansReply, SpansRequest
from p2ptrain.net.fields import limited
from p2ptrain.net.message import Message, Priority
from p2ptrain.plan.chrome_trace import trace_text
from p2ptrain.plan.types.timeline import KINDS, TimelineEntry
from p2ptrain.runtime.spans import SpanRecorder

log = get_logger(__name__)


WINDOW_SECONDS = 20.0

MOST_WINDOWS = 1024
"""When there are more, every second one goes."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """One answer: at `theirs` their clock was so far ahead, give or take `error_seconds`."""

    theirs: float
    seconds: float
    error_seconds: float


class ClockOffsets:
    """By how much another device's clock is ahead, from round trips (as NTP, RFC 5905). Pure.

        asked -----> theirs        offset = theirs - (asked + answered) / 2
        answered <--               wrong by (answered - asked) / 2 at most, where one way takes
                                   longer

    Clocks drift apart, some 50 us a second at worst: so the best answer of each window counts, and
    between two windows the offset is interpolated. Times of both clocks are in seconds.
    """

    def __init__(self) -> None:
        self._windows: list[ClockOffset] = []  # the best of each
        self._window_began = 0.0

    def add(self, asked: float, theirs: float, answered: float) -> None:
        """A round trip, in the order in which they are made."""
        heard = ClockOffset(theirs, theirs - (asked + answered) / 2, (answered - asked) / 2)
        if not self._windows or theirs - self._window_began >= WINDOW_SECONDS:
            self._window_began = theirs
            self._windows.append(heard)
            if len(self._windows) > MOST_WINDOWS:
                self._windows = self._windows[::2]
        elif heard.error_seconds < self._windows[-1].error_seconds:
            self._windows[-1] = heard

    @property
    def error_seconds(self) -> float | None:
        """By which an aligned time may be wrong at most; None where nothing was heard."""
        return max((one.error_seconds for one in self._windows), default=None)

    @property
    def newest(self) -> ClockOffset | None:
        """Of the last window."""
        return self._windows[-1] if self._windows else None

    def aligned(self, theirs: float) -> float:
        """That time of their clock by this device's.

        Raises:
            ValueError: nothing was heard of it.
        """
        if not self._windows:
            raise ValueError("no round trip to that device was made")
        after = bisect_right(self._windows, theirs, key=lambda one: one.theirs)
        if after in (0, len(self._windows)):
            return theirs - self._windows[max(after - 1, 0)].seconds
        first, then = self._windows[after - 1], self._windows[after]
        share = (theirs - first.theirs) / (then.theirs - first.theirs)
        return theirs - (first.seconds + share * (then.seconds - first.seconds))


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """Attributes:
    every_seconds: between two questions to a device.
    answer_seconds: longest wait for an answer; the next question is asked then.
    begin_seconds: the same for all devices, before the first round of a plan.
    first_round_trips: to begin with, so that the first spans are aligned well.
    most_spans: kept in all; one takes 49 bytes here, and some 200 in the file.
    """

    every_seconds: float = 1.0
    answer_seconds: float = 5.0
    begin_seconds: float = 1.0
    first_round_trips: int = 5
    most_spans: int = 500_000


@dataclass(slots=True)
class _TracedDevice:
    """Attributes:
    dropped: spans that were forgotten, there or here.
    """

    name: str
    clock: ClockOffsets = field(default_factory=ClockOffsets)
    spans: deque[SpanColumns] = field(default_factory=deque)
    dropped_there: int = 0
    dropped_here: int = 0


class SpanCollector:
    """Of one job: `run` beside it, `fetch` once more when it ends, then `write`."""

    def __init__(
        self,
        mesh: Mesh,
        recorder: SpanRecorder,
        devices: Callable[[], Collection[str]],
        settings: CollectorSettings | None = None,
    ) -> None:
        """`recorder`: of this device; `devices`: ids of those that have a part now."""
        self._mesh = mesh
        self._recorder = recorder
        self._devices = devices
        self._settings = settings or CollectorSettings()
        self._traced: dict[str, _TracedDevice] = {}
        self._count = 0

    async def run(self) -> None:
        """Fetch until cancelled."""
        while True:
            await self.fetch()
            await asyncio.sleep(self._settings.every_seconds)

    async def begin(self) -> None:
        """Devices record from now on; one that does not answer soon does later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.begin_seconds):
                await self.fetch()

    async def fetch(self) -> None:
        """What is there now, of every device that answers."""
        others = [device for device in self._devices() if device != self._mesh.self_id]
        async with task_scope() as scope:
            asked = [scope.create_task(self._fetch_from(device)) for device in others]
            own = SpanColumns.of(self._recorder.take(MOST_SPANS))
            self._keep(self._of(self._mesh.self_id), own, self._recorder.dropped)
            for task in asked:
                await task

    async def _fetch_from(self, device: str) -> None:
        try:
            traced = self._of(device)
            times = 1 if traced.clock.newest else self._settings.first_round_trips
            for _ in range(times):
                await self._look_at_clock(device, traced)
            while await self._fetch_some(device, traced) == MOST_SPANS:
                pass
        except (Error, TimeoutError) as error:
            log.info("no_spans", device=device[:12], why=str(error) or "it took too long")

    async def _look_at_clock(self, device: str, traced: _TracedDevice) -> None:
        asked = perf_counter()
        reply = await self._mesh.call(
            device,
            Message(SPANS, SpansRequest(0).fields()),
            timeout_seconds=self._settings.answer_seconds,
            reply_parts=_REPLY_PARTS,
        )
        traced.clock.add(asked, SpansReply.read(reply.fields).clock_seconds, perf_counter())

    async def _fetch_some(self, device: str, traced: _TracedDevice) -> int:
        reply = await self._mesh.call(
            device,
            Message(SPANS, SpansRequest(MOST_SPANS).fields()),
            timeout_seconds=self._settings.answer_seconds,
            priority=Priority.BULK,
            reply_parts=_REPLY_PARTS,
        )
        columns = await read_part(SpanColumns, reply)
        self._keep(traced, columns, SpansReply.read(reply.fields).dropped)
        return len(columns)

    def _of(self, device: str) -> _TracedDevice:
        if device not in self._traced:
            self._traced[device] = _TracedDevice(display_name(self._mesh, device))
        return self._traced[device]

    def _keep(self, traced: _TracedDevice, columns: SpanColumns, dropped: int) -> None:
        traced.dropped_there = dropped
        if not len(columns):
            return
        traced.spans.append(columns)
        self._count += len(columns)
        while self._count > self._settings.most_spans:
            fullest = max(self._traced.values(), key=lambda one: sum(map(len, one.spans)))
            oldest = fullest.spans.popleft()
            fullest.dropped_here += len(oldest)
            self._count -= len(oldest)

    # -- the file --------------------------------------------------------------------------------

    async def write(self, path: Path) -> None:
        """Raises TrainingError: it cannot be written there."""
        await run_in_background(lambda: self._write(path))

    def _write(self, path: Path) -> None:
        names = [traced.name for traced in self._traced.values()]
        try:
            write_whole(path, trace_text(self.entries, names, self.about()))
        except OSError as error:
            why = error.strerror or str(error)
            raise TrainingError(f"the trace cannot be written to {path}: {why}") from error

    def about(self) -> Mapping[str, Any]:
        """What the file says beside the spans: how well clocks are aligned, what is missing."""
        devices = {}
        for device, traced in self._traced.items():
            error = 0.0 if device == self._mesh.self_id else traced.clock.error_seconds
            devices[traced.name] = {
                "clock_error_us": None if error is None else round(error * 1e6, 1),
                "spans": sum(map(len, traced.spans)),
                "dropped_spans": traced.dropped_there + traced.dropped_here,
            }
        return {"p2ptrain": __version__, "clock_of": self._mesh.name, "devices": devices}

    def entries(self, rounds: int | None = None) -> Iterator[TimelineEntry]:
        """What is kept, device by device, by this device's clock.

        Args:
            rounds: of each device only its newest ones.
        """
        for device, traced in list(self._traced.items()):
            if device == self._mesh.self_id or traced.clock.newest is not None:
                yield from self._entries_of(device, traced, rounds)

    def _entries_of(
        self, device: str, traced: _TracedDevice, rounds: int | None
    ) -> Iterator[TimelineEntry]:
        aligned = float if device == self._mesh.self_id else traced.clock.aligned
        blocks = list(traced.spans)
        if rounds is not None:
            blocks = _newest(blocks, rounds)
        if not blocks:
            return
        starts = np.concatenate([block.time_rows()[:, 0] for block in blocks])
        ends = np.concatenate([block.time_rows()[:, 1] for block in blocks])
        places = np.concatenate([block.place_rows()[:, :3] for block in blocks])
        kinds = np.concatenate([np.frombuffer(block.kinds, np.uint8) for block in blocks])
        peers = [block.devices[n] for block in blocks for n in block.place_rows()[:, 3].tolist()]
        order = np.argsort(starts, kind="stable")
        if rounds is not None:
            indices = places[order, 1]
            order = order[indices > indices.max() - rounds]
        for n in order.tolist():
            stage, index, number = places[n].tolist()
            kind = KINDS[kinds[n]]
            peer = display_name(self._mesh, peers[n]) if peers[n] else None
            yield TimelineEntry(
                kind=kind,
                device=traced.name,
                stage=stage,
                micro_batch=None if number < 0 else number,
                start_seconds=aligned(float(starts[n])),
                end_seconds=aligned(float(ends[n])),
                receiver=peer if kind.startswith("send") else None,
                sender=peer if kind.startswith("receive") else None,
                round=None if index < 0 else index,
            )


def _newest(blocks: Sequence[SpanColumns], rounds: int) -> list[SpanColumns]:
    """Those that have spans of the newest rounds: of a long trace the last few."""
    found: list[SpanColumns] = []
    newest = -1
    for block in reversed(blocks):
        last = int(block.place_rows()[:, 1].max())
        newest = max(newest, last)
        if last <= newest - rounds:
            break
        found.append(block)
    return found[::-1]


_REPLY_PARTS = limited(SpanColumns.LIMIT.most_bytes)


@asynccontextmanager
async def traced(
    collector: SpanCollector, path: Path, warn: Callable[[str], None]
) -> AsyncIterator[None]:
    """Collect while something is trained, and write the file however that ends."""
    running = asyncio.create_task(collector.run(), name="trace")
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await collector.fetch()
        try:
            await collector.write(path)
        except TrainingError as error:
            warn(str(error))
