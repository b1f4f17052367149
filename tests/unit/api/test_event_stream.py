"""What an app gives as `on_event` is looked at before anything runs, and watched."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import p2ptrain
from p2ptrain import events
from p2ptrain.api import event_stream
from p2ptrain.errors import OptionError


async def _awaited(event: object) -> None:
    pass


@pytest.mark.parametrize(
    ("on_event", "words"),
    [
        ("print", "on_event must be a function, not str"),
        (lambda: None, "on_event is called with one event"),
        (lambda step, loss: None, "missing a required argument: 'loss'"),
        (_awaited, "called and not awaited"),
    ],
)
def test_what_cannot_be_called_with_an_event_is_refused_before_anything_runs(
    on_event: Any, words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        p2ptrain.Node(on_event=on_event)


@pytest.mark.parametrize("on_event", [None, print, lambda event, more=None: None, [].append])
def test_what_can_be_is_taken(on_event: Any) -> None:
    event_stream.check_on_event(on_event)


def test_one_that_does_not_return_is_said() -> None:
    said = threading.Event()
    words: list[str] = []

    def warn(text: str) -> None:
        words.append(text)
        said.set()

    event_stream.CallWatch(0.001, 0.0, warn).call(lambda _: said.wait(10), events.Warning("so"))
    assert said.is_set()
    assert "on_event, at the event 'warning', has not returned for" in words[0]
