"""A place as JSON, for `step-aside`.

Two processes' clocks need not agree: a pairing window travels as the seconds that are left of it.
"""

from __future__ import annotations

import json
import math
from typing import Any

from p2ptrain.control.place import Place
from p2ptrain.errors import UserError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.window import CODE_DIGITS, WINDOW_SECONDS, Window

_log = get_logger(__name__)


def place_fields(place: Place, now: float) -> dict[str, Any]:
    """What the lender sends; `now` is on the clock of the place's window."""
    return {"name": place.name, "port": place.port, **window_fields(place.window, now)}


def read_place(fields: object, now: float) -> Place:
    """The other side of `place_fields`.

    Raises:
        UserError: it is something else.
    """
    match fields:
        case {"name": str(name), "port": int(port), **rest} if 0 <= port < 65536:
            return Place(name, port, _window(rest.get("window"), now))
    raise UserError(
        "the member on this device answers in a way that this version does not know: stop "
        "`p2ptrain join` and start it again"
    )


def window_fields(window: Window | None, now: float) -> dict[str, Any]:
    """What the borrower says last."""
    if window is None:
        return {"window": None}
    return {
        "window": {
            "code": window.code,
            "seconds_left": window.closes_at - now,
            "wrong_tries": window.wrong_tries,
            "invited": window.invited,
        }
    }


def read_window(text: str | None, now: float) -> Window | None:
    """The window in the borrower's last word; closed where it died without one."""
    if text is None:
        return None
    try:
        fields: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        _log.warning("the borrower of this device's place gave back something else", why=str(error))
        return None
    return _window(fields.get("window") if isinstance(fields, dict) else fields, now)


def _window(fields: Any, now: float) -> Window | None:
    match fields:
        case None:
            return None
        case {
            "code": str(code),
            "seconds_left": int(left) | float(left),
            "wrong_tries": int(wrong_tries),
            "invited": bool(invited),
        } if _is_code(code) and math.isfinite(left) and wrong_tries >= 0:
            return Window(code, now + min(left, WINDOW_SECONDS), wrong_tries, invited)
    _log.warning("a pairing window that another process had is not readable: it is closed")
    return None


def _is_code(text: str) -> bool:
    return len(text) == CODE_DIGITS and text.isascii() and text.isdigit()
