"""Events for programs: one JSON object a line (RFC 8259, so no NaN), flushed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from p2ptrain.observe.events import Event
from p2ptrain.observe.renderer import LineWriter


class JsonRenderer:
    """Writes each event as one line of JSON."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def show(self, event: Event) -> None:
        """Write `event`."""
        self._writer.write(dump_line(event.to_json()))

    def close(self) -> None:
        """Nothing to end: every line went out when it was shown."""


def dump_line(body: Mapping[str, Any]) -> str:
    """`body` as JSON on one line; numbers that JSON does not have (NaN, infinity) become null."""
    try:
        return json.dumps(body, allow_nan=False, ensure_ascii=False)
    except ValueError:
        return json.dumps(_finite(body), allow_nan=False, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
