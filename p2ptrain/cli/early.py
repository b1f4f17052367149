"""Ctrl-C and SIGTERM while the command still loads: kept until it can act on them.

Loading takes a second or more on a small device. Python would end there with a traceback from the
middle of an import, and a SIGTERM would end it without a word.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}
_kept: list[int] = []


def keep() -> None:
    """From now on only note the signals, those that are not ignored anyway."""
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if handler is not signal.SIG_IGN:
            _before[number] = handler
            signal.signal(number, lambda received, _frame: _kept.append(received))


def release() -> bool:
    """Handle signals as before `keep`; whether one came meanwhile. Harmless when repeated."""
    for number, handler in _before.items():
        signal.signal(number, handler)
    came = bool(_kept)
    _before.clear()
    _kept.clear()
    return came
