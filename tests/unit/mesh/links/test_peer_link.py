"""What a link knows of its peer."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from p2ptrain.errors import PeerError, ProtocolError
from p2ptrain.mesh.links.handler_queues import QueueLimits
from p2ptrain.mesh.links.hello import Hello, LinkAction, between_instances
from p2ptrain.mesh.links.peer_link import DISCARD_LIMIT_BYTES, PeerLink
from p2ptrain.mesh.links.router import Router
from p2ptrain.net.frame import Header
from p2ptrain.net.link.link import Link
from p2ptrain.net.message import Message, Priority
from tests.support.links import Inbox
from tests.support.memory_links import connect


class _Owner:
    def hello_received(self, link: PeerLink, hello: Hello) -> None: ...

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
    assert between_instances("a" * 64, older, copy).action is LinkAction.REFUSE


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


async def test_parts_of_a_kind_that_no_handler_routes_are_not_kept() -> None:
    """Their sender does not take the refusals, so all of its messages wait."""
    refused: list[str] = []

    async def send(peer: str, _message: Message, _priority: Priority) -> None:
        refused.append(peer)
        await asyncio.Event().wait()

    router = Router("me", send)
    with ThreadPoolExecutor(1) as executor:
        link = PeerLink("a" * 64, _Owner(), router, None, executor)
        other = Link("b" * 64, Inbox())
        connect(link.link, other)
        link.come_up(Hello("anna", "old", uptime_seconds=0.1, port=1))
        put: list[Message] = []
        all_put, router_put = asyncio.Event(), router.put

        def keep(peer_id: str, message: Message) -> bool:
            put.append(message)
            if len(put) == 3:
                all_put.set()
            return router_put(peer_id, message)

        router.put = keep  # type: ignore[method-assign]
        for number in range(1, 4):
            await other.send(Message("x.y", {"_call": [number, 0]}, (memoryview(bytes(10_000)),)))
        await asyncio.wait_for(all_put.wait(), 5.0)
        assert [message.parts_bytes for message in put] == [0, 0, 0]
        assert router.refused == {"x.y": 3}
        assert refused == ["a" * 64]
        link.link.abort()
        await other.closed
        await router.close()


async def test_a_device_whose_headers_wait_in_many_lanes_has_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A header of empty lists takes seventy times its bytes while it waits."""
    limits, may_end = QueueLimits(headers_bytes=5000), asyncio.Event()
    router = Router("me", _send, limits=limits)

    async def wait(_peer: str, _message: Message) -> None:
        await may_end.wait()

    kinds = ("one", "two", "three")
    for kind in kinds:
        router.route(kind, wait, lambda _peer, _fields, sizes: [memoryview(bytearray(*sizes))])
    with ThreadPoolExecutor(1) as executor:
        link = PeerLink("a" * 64, _Owner(), router, None, executor)
        other = Link("b" * 64, Inbox())
        connect(link.link, other)
        link.come_up(Hello("anna", "old", uptime_seconds=0.1, port=1))
        told: asyncio.Queue[bool] = asyncio.Queue()
        router_put = router.put

        def put(peer_id: str, message: Message) -> bool:
            told.put_nowait(router_put(peer_id, message))
            return True  # so that all of them come

        router.put = put  # type: ignore[method-assign]
        for parts in ((), (memoryview(bytes(1)),)):
            for kind in kinds:
                await other.send(Message(kind, {"x": [[]] * 1000}, parts))
        assert [await told.get() for _ in range(6)] == [True] * 4 + [False] * 2
        link.link.abort()
        await other.closed
        await router.close()


async def test_a_message_of_absurd_size_that_no_handler_routes_breaks_the_protocol() -> None:
    with ThreadPoolExecutor(1) as executor:
        link = PeerLink("a" * 64, _Owner(), Router("me", _send), None, executor)
    link.come_up(Hello("anna", "old", uptime_seconds=0.1, port=1))
    assert link.open_parts(link.link, Header("x.y", {}, (DISCARD_LIMIT_BYTES,))) is None
    with pytest.raises(ProtocolError, match="no handler here expects"):
        link.open_parts(link.link, Header("x.y", {}, (DISCARD_LIMIT_BYTES, 1)))
