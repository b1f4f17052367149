"""Which links a device keeps, and what they cost it: on links inside one process."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain.aio.tasks import TaskScope
from p2ptrain.errors import LinkClosed
from p2ptrain.mesh.guard import Guard
from p2ptrain.mesh.links.connections import WAITING_LIMIT, Connections
from p2ptrain.mesh.links.hello import HELLO_KIND, Hello, to_message
from p2ptrain.mesh.links.link_probe import PathConfig
from p2ptrain.mesh.links.paths import KnownPeer, PathMover, PathSchedule
from p2ptrain.mesh.links.peer_link import PeerLink
from p2ptrain.mesh.links.router import Router
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.net.link.link import Link
from p2ptrain.net.link.stream import Address
from p2ptrain.net.message import Message, Priority
from p2ptrain.net.transport.dial import Backoff, MakeLink
from tests.support.links import Inbox
from tests.support.memory_links import connect

SELF, PEER = "a" * 64, "b" * 64
THEIRS = Hello("bert", "other", uptime_seconds=1.0, port=4000, token="t")


async def _send(_peer: str, _message: Message, _priority: Priority) -> None: ...


@dataclass
class Home:
    """Connections of one device, and what they have reported to it."""

    executor: ThreadPoolExecutor
    tasks: TaskScope
    up: list[str] = field(default_factory=list)
    own_hellos: int = 0
    dialled: list[str] = field(default_factory=list)
    dial_error: Exception = field(default_factory=lambda: LinkClosed("nobody is there"))
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        router = Router("anna", _send)
        trust: Any = SimpleNamespace(name=lambda peer: peer, is_trusted=lambda _peer: True)
        notices = WarnOnce(lambda _event: None, trust.name)
        self.connections = Connections(
            SELF,
            router,
            Guard(trust, notices, lambda _peer: None),
            notices,
            self.tasks,
            Random(1),
            own_hello=self.own_hello,
            dial=self.dial,
            on_up=lambda peer, _hello: self.up.append(peer),
            on_lost=lambda _peer, _refused: None,
            on_replaced=lambda _peer: None,
            on_not_paired=lambda _peer: None,
            on_copied=lambda _peer, _where: None,
        )

    def own_hello(self) -> Hello:
        self.own_hellos += 1
        return Hello("anna", "one", uptime_seconds=2.0, port=4000)

    async def dial(self, _addresses: Sequence[Address], peer: str, _make: MakeLink) -> Link:
        self.dialled.append(peer)
        self.changed.set()
        raise self.dial_error

    def dialled_by(self, inbox: Inbox) -> Link:
        """The far end of a link that the peer has dialled."""
        far = Link(SELF, inbox)
        connect(self.connections.incoming(PEER), far)
        return far


@asynccontextmanager
async def at_home() -> AsyncIterator[Home]:
    with ThreadPoolExecutor(1) as executor:
        async with TaskScope() as tasks:
            home = Home(executor, tasks)
            yield home
            await home.connections.close()


async def test_a_link_is_up_once_its_hello_is_answered() -> None:
    async with at_home() as home:
        home.connections.keep(PEER)
        inbox = Inbox()
        await home.dialled_by(inbox).send(to_message(THEIRS))
        assert [message.kind for message in await inbox.count(1)] == [HELLO_KIND]
        assert home.up == [PEER]


async def test_a_device_that_leaves_takes_no_new_links() -> None:
    """Whose link has ended dials at once, so it would come between the good-bye and the end."""
    async with at_home() as home:
        home.connections.keep(PEER)
        await home.connections.close()
        with pytest.raises(LinkClosed, match="leaving"):
            home.connections.incoming(PEER)


async def test_a_hello_that_comes_while_leaving_asks_nothing_of_the_mesh() -> None:
    """The listener may be closed by then, and with it what a hello tells of this device."""
    async with at_home() as home:
        home.connections.keep(PEER)
        link = PeerLink(PEER, home.connections, Router("anna", _send), None, home.executor)
        inbox = Inbox()
        connect(link.link, Link(SELF, inbox))
        await home.connections.close()
        home.connections.hello_received(link, THEIRS)
        assert (await inbox.count(1))[0].fields["reason"] == "leaving"
    assert home.own_hellos == 0
    assert home.up == []


async def test_of_many_links_that_a_device_dials_the_oldest_give_way() -> None:
    """It says nothing on them, and each costs a file descriptor for some seconds."""
    async with at_home() as home:
        home.connections.keep(PEER)
        up = Inbox()
        await home.dialled_by(up).send(to_message(THEIRS))
        await up.count(1)
        links = [home.dialled_by(Inbox()) for _ in range(WAITING_LIMIT + 2)]
        for link in links[:2]:
            await link.closed
        assert all(link.is_open for link in links[2:])
        assert home.connections.connected() == [PEER]


async def test_a_link_that_has_ended_is_kept_by_nothing() -> None:
    """Its buffers are large, and a device may dial again and again."""
    async with at_home() as home:
        home.connections.keep(PEER)
        link = home.connections.incoming(PEER)
        connect(link, Link(SELF, Inbox()))
        kept, ended = weakref.ref(link), link.closed
        link.abort()
        await ended
        del link, ended
        await asyncio.sleep(0)  # the loop lets go of what it has just called
        gc.collect()
        assert kept() is None


@pytest.mark.parametrize("error", [UnicodeError("label too long"), ValueError("null character")])
async def test_a_dial_that_breaks_costs_that_dial_only(error: Exception) -> None:
    async with at_home() as home:
        home.dial_error = error
        home.connections.keep(PEER, [("10.0.0.2", 4000)])
        for count in (1, 2):  # the second time since another hint has come
            async with asyncio.timeout(5):
                while len(home.dialled) < count:
                    await home.changed.wait()
                    home.changed.clear()
            home.connections.hint(PEER, [("10.0.0.3", 4000)])
        inbox = Inbox()
        await home.dialled_by(inbox).send(to_message(THEIRS))
        await inbox.count(1)
        assert home.up == [PEER]


class Moves:
    """Where a mover has dialled a device that has two addresses and a link over the first."""

    def __init__(self, tasks: TaskScope, *, answers: bool) -> None:
        self.dialled: list[Sequence[Address]] = []
        self.asked = asyncio.Event()
        link: Any = SimpleNamespace(
            theirs=THEIRS, link=SimpleNamespace(ends=lambda: ("10.0.0.1", "10.0.0.2"))
        )
        self.peer = KnownPeer(Backoff(Random(1)), PathSchedule(PathConfig()), current=link)
        self.peer.addresses.prove([("10.0.0.2", 4000), ("10.1.0.2", 4000)])

        async def answered(_peer: str) -> bool:
            self.asked.set()
            return answers

        async def redial(_peer: str, addresses: Sequence[Address], _link: object) -> None:
            self.dialled.append(addresses)

        dial: Any = None
        self.mover = PathMover(tasks, dial, redial, PathConfig(), answered)


@pytest.mark.parametrize("answers", [True, False])
async def test_a_suspected_device_is_dialled_over_another_path_if_its_link_is_silent(
    answers: bool,
) -> None:
    """Others may suspect it, and a moved link is one more sign of trouble to them."""
    async with TaskScope() as tasks:
        moves = Moves(tasks, answers=answers)
        moves.mover.leave(PEER, moves.peer)
        await moves.asked.wait()
    assert moves.dialled == ([] if answers else [[("10.1.0.2", 4000)]])
