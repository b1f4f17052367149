"""Flow control of a link: its bounds, its measured rate, how much to write, a peer's least pace.

The rate comes from the writing itself, in windows of WINDOW_SECONDS. Where the transport made us
wait, bytes / time is the link's rate; in other windows the rate is at least that, so an estimate
only rises. Idle time does not count. Where messages are small for the link, the first estimate
takes several windows together.

What has left our lanes cannot be overtaken: the frame being written, and what the kernel holds
unsent. Both are bounded by the time that the link takes for them, not by bytes: 128 KiB are 1 ms at
1 Gbit/s, and a second at 1 Mbit/s, in which a heartbeat would come too late. The kernel must still
have enough to keep the link busy until the event loop gets its turn, some milliseconds while a
model trains beside it.

A peer that declares a large body and then sends nothing would hold memory for as long as it likes.
So while a message is unfinished, every `seconds` must bring at least `least_bytes`, of any lane: a
bulk message may wait long behind urgent ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from p2ptrain.net.frame import CHUNK_LIMIT_BYTES
from p2ptrain.net.link.compression import ChooserSettings
from p2ptrain.net.message import Priority


class Timer(Protocol):
    """What `call_later` gives back."""

    def cancel(self) -> None:
        """Do not call."""


class LoopClock(Protocol):
    """The clock of an event loop; tests bring their own."""

    def time(self) -> float:
        """Monotonic seconds."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Timer:
        """Call `callback` in `delay` seconds."""


class SystemClock:
    """The system's own clock: an event loop's may stand still within a turn."""

    time = staticmethod(time.monotonic)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.call_later: Callable[[float, Callable[[], None]], Timer] = loop.call_later


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Bounds of a link.

    Attributes:
        budget_bytes: most bytes queued in a lane other than CONTROL. Larger: senders wait less;
            smaller: less memory, and newer data waits behind less old data.
        control_budget_bytes: the same for CONTROL.
        stall_seconds: an unfinished message must bring `stall_bytes` in this time, or the link
            ends. Shorter: a hostile peer holds memory less long; longer: patience with devices
            that freeze.
        stall_bytes: see `stall_seconds`.
        flush_seconds: how long `close` tries to send what is queued.
        compression: how LZ4 is decided on.
    """

    budget_bytes: int = 8 * 2**20
    control_budget_bytes: int = 2**20
    stall_seconds: float = 10.0
    stall_bytes: int = 4096
    flush_seconds: float = 2.0
    compression: ChooserSettings = field(default_factory=ChooserSettings)

    def budgets_bytes(self) -> dict[Priority, int]:
        """Budget of each lane."""
        budgets = dict.fromkeys(Priority, self.budget_bytes)
        budgets[Priority.CONTROL] = self.control_budget_bytes
        return budgets


@dataclass(frozen=True, slots=True)
class LinkCounters:
    """Totals since the link was made.

    Attributes:
        sent_bytes, received_bytes: on the wire, frames and headers included, TLS not.
        sent_parts_bytes: part bytes queued for sending, before compression.
        sent_messages, received_messages: of all lanes.
        queued_bytes: waiting to be framed now, all lanes, before compression.
        link_bytes_per_s: what the link takes while it is the limit; None while it never was.
    """

    sent_bytes: int
    received_bytes: int
    sent_parts_bytes: int
    sent_messages: int
    received_messages: int
    queued_bytes: int
    link_bytes_per_s: float | None


WINDOW_SECONDS = 0.1

SHORTEST_SECONDS = 0.02
"""A shorter window mostly measures the kernel's buffers."""

PROVING_BYTES = 8 * 128 * 1024
"""So much taken at once, without a wait, says that a link is fast however short the window was."""

NEWEST_WEIGHT = 0.5

HELD_BYTES = 128 * 1024
"""What was written may lie in the kernel still, so much of it."""

FALL = 4.0
"""A rate that is this many times lower is believed at once: too much is given away meanwhile."""


class LinkRateMeter:
    """Estimates a link's bytes/s.

    Attributes:
        bytes_per_s: None until the link has been the limit.
        at_least_bytes_per_s: what it took meanwhile without making us wait.
    """

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self.at_least_bytes_per_s = 0.0
        self._since: float | None = None
        self._bytes = 0
        self._waited = False
        self._short_bytes = 0  # of short times in which it was the limit
        self._short_seconds = 0.0

    def wrote(self, count: int, now: float) -> None:
        """`count` bytes went to the transport."""
        if self._since is None:
            self._since = now
        self._bytes += count
        if now - self._since >= WINDOW_SECONDS:
            self._close_window(now)
            self._since = now

    def waited(self) -> None:
        """The transport's buffers are full: the link is what limits us."""
        self._waited = True

    def idle(self, now: float) -> None:
        """Nothing is left to send."""
        since = self._since
        proves = self.bytes_per_s is None and not self._waited and self._bytes >= PROVING_BYTES
        if since is not None and (now - since >= SHORTEST_SECONDS or (proves and now > since)):
            self._close_window(now)
        elif since is not None and self.bytes_per_s is None and self._waited:
            self._add_short(now - since)
        self._since = None
        self._bytes = 0
        self._waited = False

    def _add_short(self, seconds: float) -> None:
        self._short_bytes += max(self._bytes - HELD_BYTES, 0)
        self._short_seconds += seconds
        if self._short_seconds >= SHORTEST_SECONDS and self._short_bytes:
            self.bytes_per_s = self._short_bytes / self._short_seconds

    def _close_window(self, now: float) -> None:
        assert self._since is not None
        rate = self._bytes / (now - self._since)
        old = self.bytes_per_s
        if self._waited:
            if old is None or rate * FALL < old:
                old = rate
            self.bytes_per_s = old + NEWEST_WEIGHT * (rate - old)
        elif old is not None:
            self.bytes_per_s = max(old, rate)
        else:
            left = (self._bytes - HELD_BYTES) / (now - self._since)
            self.at_least_bytes_per_s = max(self.at_least_bytes_per_s, left)
        self._bytes = 0
        self._waited = False


FRAME_SECONDS = 0.024
"""Longer: fewer frames, each of which costs a slow device a third of a millisecond at either end:
with 10 ms the event loop took a third more processor time at 100 Mbit/s.
Shorter: what is urgent waits less behind the frame under way."""

MIN_FRAME_BYTES = 4 * 1024

MAX_FRAME_BYTES = CHUNK_LIMIT_BYTES

UNSENT_SECONDS = 0.012
"""Longer: the link stays busy over longer pauses of this process. Shorter: heartbeats, and tensors
behind all-reduce and weights, wait less. The kernel asks for more when half of it is left."""

MIN_UNSENT_BYTES = 8 * 1024

MAX_UNSENT_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class WriteSizes:
    """Sizes in bytes.

    Attributes:
        frame_bytes: most payload of a frame.
        lowest_frame_bytes: the same in the lowest lane, which is never waited for.
        unsent_bytes: most that the kernel should hold of what has not left this device.
    """

    frame_bytes: int
    lowest_frame_bytes: int
    unsent_bytes: int


MAX_UNPROVEN_BYTES = 64 * 1024
"""Of a frame, while it is only known that the link takes as much as it was given so far."""

UNKNOWN = WriteSizes(frame_bytes=32 << 10, lowest_frame_bytes=32 << 10, unsent_bytes=128 << 10)
"""While the link has not been the limit yet."""


def portions(bytes_per_s: float | None, at_least_bytes_per_s: float = 0.0) -> WriteSizes:
    """For a link that takes so many bytes a second; None while it is only known to take some.

    Powers of two, so that small changes of the rate change nothing.
    """
    if bytes_per_s is None:
        proven = max(_power_of_two(at_least_bytes_per_s * FRAME_SECONDS), UNKNOWN.frame_bytes)
        most = (min(proven, MAX_UNPROVEN_BYTES), min(proven, MAX_FRAME_BYTES))
        return WriteSizes(*most, UNKNOWN.unsent_bytes)
    frame = _power_of_two(bytes_per_s * FRAME_SECONDS)
    frame = min(max(frame, MIN_FRAME_BYTES), MAX_FRAME_BYTES)
    unsent = _power_of_two(bytes_per_s * UNSENT_SECONDS)
    return WriteSizes(frame, frame, min(max(unsent, MIN_UNSENT_BYTES), MAX_UNSENT_BYTES))


def _power_of_two(count: float) -> int:
    """The largest power of two that is at most `count`, but at least 1."""
    return 1 << max(int(count).bit_length() - 1, 0)


class StallWatch:
    """Pure: asked now and then, it says whether the peer has stalled."""

    def __init__(self, seconds: float, least_bytes: int) -> None:
        self._seconds = seconds
        self._least_bytes = least_bytes
        self._since: float | None = None
        self._bytes_then = 0

    def stalled(self, partial: bool, received_bytes: int, now: float) -> bool:
        """Whether too little came for too long.

        Args:
            partial: whether a message has begun and not ended.
            received_bytes: total received on the link so far.
            now: seconds of a monotonic clock.
        """
        if not partial:
            self._since = None
            return False
        if self._since is None or received_bytes - self._bytes_then >= self._least_bytes:
            self._since = now
            self._bytes_then = received_bytes
            return False
        return now - self._since >= self._seconds
