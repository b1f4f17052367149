"""The bounds, counters and clock of a link."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

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
