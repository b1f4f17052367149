"""Devices and connected pairs of links, in memory and over TLS on loopback."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest

from p2ptrain.net.link.flow_control import LinkSettings
from p2ptrain.net.link.link import Link
from p2ptrain.net.transport.dial import dial
from p2ptrain.net.transport.listener import Listener, ListenerHooks, ListenerSettings
from p2ptrain.net.transport.pairing_channel import PairingChannel
from p2ptrain.net.transport.tls import client_context, server_context
from tests.support import memory_links
from tests.support.links import Device, Inbox, make_device


@dataclass
class Pair:
    """Two connected links and who receives at their ends."""

    left: Link
    right: Link
    left_inbox: Inbox
    right_inbox: Inbox


@dataclass
class House:
    """A listening device and what reached it."""

    device: Device
    pinned: list[bytes]
    inbox: Inbox = field(default_factory=Inbox)
    links: list[Link] = field(default_factory=list)
    channels: list[PairingChannel] = field(default_factory=list)
    settings: ListenerSettings = field(default_factory=ListenerSettings)
    knows: str = ""
    contexts_fail: bool = False

    def __post_init__(self) -> None:
        self.door = ListenerHooks(
            self.context, self.make_link, self.on_unpaired, lambda host: host == self.knows
        )
        self.listener = Listener(self.door, self.settings)

    def context(self) -> ssl.SSLContext:
        if self.contexts_fail:
            raise ValueError("a bug")
        return server_context(self.device.pem_file, self.pinned)

    def make_link(self, peer_id: str) -> Link:
        self.links.append(Link(peer_id, self.inbox))
        self.inbox.changed.set()
        return self.links[-1]

    def on_unpaired(self, channel: PairingChannel) -> None:
        self.channels.append(channel)
        self.inbox.changed.set()

    async def channel(self) -> PairingChannel:
        await self.inbox.until(lambda inbox: bool(self.channels))
        return self.channels[-1]


@dataclass
class Caller:
    """A device that dials."""

    device: Device
    inbox: Inbox = field(default_factory=Inbox)

    async def dial(self, house: House, expected: Device | None = None) -> Link:
        wanted = expected or house.device
        return await dial(
            house.listener.addresses,
            client_context(self.device.pem_file, [wanted.certificate_der]),
            wanted.id,
            lambda peer_id: Link(peer_id, self.inbox),
        )


Connect: TypeAlias = Callable[..., Awaitable[Pair]]


@pytest.fixture
def left_device(tmp_path: Path) -> Device:
    return make_device(tmp_path, "left")


@pytest.fixture
def right_device(tmp_path: Path) -> Device:
    return make_device(tmp_path, "right")


@pytest.fixture
def stranger(tmp_path: Path) -> Device:
    return make_device(tmp_path, "stranger")


@pytest.fixture(params=["memory", "tls"])
async def connect(
    request: pytest.FixtureRequest, left_device: Device, right_device: Device
) -> AsyncIterator[Connect]:
    """Makes connected pairs, of both kinds in turn; ends them after the test."""
    async with AsyncExitStack() as stack:

        async def make(settings: LinkSettings | None = None) -> Pair:
            if request.param == "memory":
                pair = _memory_pair(settings, left_device, right_device)
            else:
                pair = await _tls_pair(settings, left_device, right_device, stack)
            stack.push_async_callback(_end, pair)
            return pair

        yield make


async def _end(pair: Pair) -> None:
    pair.left.abort()
    pair.right.abort()
    await pair.left.closed
    await pair.right.closed


def _memory_pair(settings: LinkSettings | None, left: Device, right: Device) -> Pair:
    inboxes = Inbox(), Inbox()
    links = Link(right.id, inboxes[0], settings), Link(left.id, inboxes[1], settings)
    pair = Pair(*links, *inboxes)
    memory_links.connect(pair.left, pair.right)
    return pair


async def _tls_pair(
    settings: LinkSettings | None, left: Device, right: Device, stack: AsyncExitStack
) -> Pair:
    left_inbox, right_inbox = Inbox(), Inbox()
    accepted: list[Link] = []

    def accept(peer_id: str) -> Link:
        accepted.append(Link(peer_id, right_inbox, settings))
        right_inbox.changed.set()
        return accepted[0]

    context = server_context(right.pem_file, [left.certificate_der])
    listener = Listener(ListenerHooks(lambda: context, accept))
    await listener.start(["127.0.0.1"])
    stack.push_async_callback(listener.close)
    dialled = await dial(
        listener.addresses,
        client_context(left.pem_file, [right.certificate_der]),
        right.id,
        lambda peer_id: Link(peer_id, left_inbox, settings),
    )
    await right_inbox.until(lambda inbox: bool(accepted))
    return Pair(dialled, accepted[0], left_inbox, right_inbox)
