"""Warnings are for people: each once."""

from __future__ import annotations

from p2ptrain import events
from p2ptrain.events import Event
from p2ptrain.mesh.notifications import REMEMBERED_LIMIT, WarnOnce


def _notices() -> tuple[WarnOnce, list[Event]]:
    told: list[Event] = []
    return WarnOnce(told.append, lambda peer_id: f"<{peer_id}>"), told


def test_what_was_said_is_not_said_again() -> None:
    notices, told = _notices()
    for text in ("one", "two", "one"):
        notices.warn(text)
    assert told == [events.Warning("one"), events.Warning("two")]


def test_a_flood_of_texts_is_not_remembered_for_ever() -> None:
    notices, told = _notices()
    for number in range(REMEMBERED_LIMIT + 1):
        notices.warn(str(number))
    notices.warn("0")
    assert told[-1] == events.Warning("0")
    assert len(told) == REMEMBERED_LIMIT + 2


def test_devices_are_named() -> None:
    notices, told = _notices()
    notices.distrusted("a")
    notices.mismatch("b", "it is older")
    first, second = (event.message for event in told if isinstance(event, events.Warning))
    assert first.startswith("<a> does not accept this device any more")
    assert second == "<b> is not connected: it is older"
