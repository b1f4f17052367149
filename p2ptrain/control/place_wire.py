"""A place as JSON, for `step-aside` and `give-back`.

Two processes' clocks need not agree: a pairing window travels as the seconds that are left of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from p2ptrain.control.place import Place
from p2ptrain.errors import ProtocolError, UserError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.window import CODE_DIGITS, WINDOW_SECONDS, Window
from p2ptrain.net.forms import Count, Range, Text
from p2ptrain.net.read_form import read_form
from p2ptrain.net.write_form import write_form

OTHER_VERSION = "the running p2ptrain join is another version: stop it and start it again"

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Said:
    name: str
    port: Annotated[int, Range(0, 65535)]
    window: Any = None


@dataclass(frozen=True, slots=True)
class _Left:
    """Of a window."""

    code: Annotated[str, Text(CODE_DIGITS, CODE_DIGITS, like="[0-9]+")]
    seconds_left: float
    wrong_tries: Count
    invited: bool


def place_fields(place: Place, now: float) -> dict[str, Any]:
    """What the lender sends; `now` is on the clock of the place's window."""
    return {"name": place.name, "port": place.port, **window_fields(place.window, now)}


def read_place(fields: object, now: float) -> Place:
    """The other side of `place_fields`.

    Raises:
        UserError: it is something else.
    """
    try:
        said = read_form(_Said, fields, "a place", extra=True)
    except ProtocolError as error:
        raise UserError(OTHER_VERSION) from error
    return Place(said.name, said.port, _window(said.window, now))


def window_fields(window: Window | None, now: float) -> dict[str, Any]:
    """What the borrower says last."""
    if window is None:
        return {"window": None}
    left = _Left(window.code, window.closes_at - now, window.wrong_tries, window.invited)
    return {"window": write_form(left)}


def read_window(text: str, now: float) -> Window | None:
    """The window in the borrower's last word."""
    try:
        fields: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        _log.warning("the borrower of this device's place gave back something else", why=str(error))
        return None
    return _window(fields.get("window") if isinstance(fields, dict) else fields, now)


def _window(fields: Any, now: float) -> Window | None:
    if fields is None:
        return None
    try:
        left = read_form(_Left, fields, "a pairing window that another process had")
    except ProtocolError as error:
        _log.warning("a pairing window is closed because it cannot be read", why=str(error))
        return None
    closes_at = now + min(left.seconds_left, WINDOW_SECONDS)
    return Window(left.code, closes_at, left.wrong_tries, left.invited)
