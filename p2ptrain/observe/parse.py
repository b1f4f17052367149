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
        fields = dataclasses.fields(kind)
        return kind(**{f.name: _read(f, body[ev.name(f)]) for f in fields if _is_needed(f, body)})
    except (KeyError, TypeError):  # of a newer version of p2ptrain
        return None


def _is_needed(field: dataclasses.Field[Any], body: Mapping[str, Any]) -> bool:
    """Fields with a default were added later: an older version does not write them."""
    missing = dataclasses.MISSING
    required = field.default is missing and field.default_factory is missing
    return required or ev.name(field) in body


def _read(field: dataclasses.Field[Any], value: Any) -> Any:
    read = _NESTED.get(field.name)
    return value if read is None else read(value)


def _stage(body: Mapping[str, Any]) -> ev.PlannedStage:
    first, end = body["units"]
    devices = tuple(ev.PlannedDevice(d["name"], d["share"]) for d in body["devices"])
    return ev.PlannedStage(
        units=(first, end),
        devices=devices,
        parameters=tuple(body["parameters"]),
        allocation=body.get("allocation", "samples"),
        warmup=body.get("warmup", 1),
    )


def _left_out(body: Mapping[str, Any]) -> ev.LeftOut:
    return ev.LeftOut(body["name"], body["reason"])


_NESTED: dict[str, Callable[[Any], Any]] = {
    "stages": lambda bodies: tuple(map(_stage, bodies)),
    "changes_results": tuple,
    "left_out": lambda bodies: tuple(map(_left_out, bodies)),
}
