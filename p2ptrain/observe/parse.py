"""Events read back from their JSON, to show those of another process as one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from p2ptrain.observe import events as ev

_KINDS: dict[str, type[ev.Event]] = {kind.event: kind for kind in ev.Event.__subclasses__()}


def parse_event(body: Mapping[str, Any]) -> ev.Event | None:
    """The event that `to_json` made `body` from; None for a kind or a shape unknown here."""
    kind = _KINDS.get(str(body.get("event")))
    if kind is None:
        return None
    try:
        return kind(**{f.name: _read(f, body[ev.name(f)]) for f in dataclasses.fields(kind)})
    except (KeyError, TypeError):  # of a newer version of p2ptrain
        return None


def _read(field: dataclasses.Field[Any], value: Any) -> Any:
    read = _NESTED.get(field.name)
    return value if read is None else read(value)


def _stage(body: Mapping[str, Any]) -> ev.PlannedStage:
    first, end = body["units"]
    devices = tuple(ev.PlannedDevice(d["name"], d["share"]) for d in body["devices"])
    return ev.PlannedStage((first, end), devices, tuple(body["parameters"]))


def _left_out(body: Mapping[str, Any]) -> ev.LeftOut:
    return ev.LeftOut(body["name"], body["reason"])


_NESTED: dict[str, Callable[[Any], Any]] = {
    "stages": lambda bodies: tuple(map(_stage, bodies)),
    "left_out": lambda bodies: tuple(map(_left_out, bodies)),
}
