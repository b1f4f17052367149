"""What the user's own functions raise, in one line that names where."""

from __future__ import annotations

from p2ptrain.model.export_errors import user_place


def told(error: Exception) -> str:
    """Class, message and the user's own line, where the traceback has one."""
    place = user_place(error)
    return f"{type(error).__name__}: {error}" + (f" (at {place})" if place else "")
