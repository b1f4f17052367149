"""What the user's own functions raise, in one line that names where."""

from __future__ import annotations

import asyncio

from p2ptrain.model.export_errors import user_place

RAISED = (Exception, asyncio.CancelledError, SystemExit, GeneratorExit)
"""What the user's functions may raise and is told: anything but an interrupt. To an event loop some
of these say something: that a task was cancelled, so that others wait for it without an end."""


def told(error: BaseException) -> str:
    """Class, message and the user's own line, where the traceback has one."""
    place = user_place(error)
    return f"{type(error).__name__}: {error}" + (f" (at {place})" if place else "")
