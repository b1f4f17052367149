"""What a link knows of its peer."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from p2ptrain.errors import PeerError
from p2ptrain.mesh.hello import Hello
from p2ptrain.mesh.link_rules import Action, between_instances
from p2ptrain.mesh.peer_link import PeerLink
from p2ptrain.mesh.router import Router
from p2ptrain.net.link import Link
from p2ptrain.net.memory import connect
from p2ptrain.net.message import Message, Priority
from tests.unit.net.helpers import Inbox


class _Owner:
    def said_hello(self, link: PeerLink, hello: Hello) -> None: ...

    def answered(self, link: PeerLink, hello: Hello) -> None: ...

    def ended(self, link: PeerLink, error: PeerError) -> None: ...


async def _send(_peer: str, _message: Message, _priority: Priority) -> None: ...


async def test_of_two_processes_the_one_that_runs_longer_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The older one had only just started when it said how long it runs."""
    now = [100.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    with ThreadPoolExecutor(1) as executor:
        link = PeerLink("a" * 64, _Owner(), Router("me", _send), None, executor)
    assert link.theirs_now() is None
    link.come_up(Hello("anna", "old", uptime_seconds=0.1, port=1))
    now[0] += 60.0
    older = link.theirs_now()
    assert older is not None
    assert older.uptime_seconds == pytest.approx(60.1)
    copy = Hello("anna", "new", uptime_seconds=0.2, port=1)
    assert between_instances("a" * 64, older, copy).action is Action.REFUSE


async def test_what_is_posted_leaves_at_once_where_there_is_room() -> None:
    inbox = Inbox()
    with ThreadPoolExecutor(1) as executor:
        link = PeerLink("a" * 64, _Owner(), Router("me", _send), None, executor)
        other = Link("b" * 64, inbox)
        connect(link.link, other)
        link.post(Message("early"))  # before the hellos: waits for `run_post`
        link.come_up(Hello("anna", "old", uptime_seconds=0.1, port=1))
        link.post(Message("second"))  # may not overtake it
        assert link.link.statistics().sent_messages == 0
        await link.flush_post()
        link.post(Message("third"))
        assert link.link.statistics().sent_messages == 3
        assert [message.kind for message in await inbox.count(3)] == ["early", "second", "third"]
        link.link.abort()
        await other.closed
