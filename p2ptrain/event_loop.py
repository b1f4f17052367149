"""The event loop that commands run on: uvloop's where it is installed, else asyncio's own.

A turn of uvloop's takes a fraction of the processor time, and a small message takes two turns: of
a device with a fifth of a core that is a fifth of what its messages cost.
It is not made for Windows. Its clock stands still within a turn, and timers count whole
milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`."""
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(main)


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """None = asyncio's."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
