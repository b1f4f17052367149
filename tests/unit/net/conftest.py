"""Devices and connected pairs of links, in memory and over TLS on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest

from p2ptrain.net.link.flow_control import LinkSettings
from p2ptrain.net.link.link import Link
from p2ptrain.net.transport.dial import dial
from p2ptrain.net.transport.listener import Listener, ListenerHooks
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
    left_inbox, right_inbox = Inbox(), Inbox()
    pair = memory_links.connect(
        Link(right.id, left_inbox, settings), Link(left.id, right_inbox, settings)
    )
    return Pair(pair.left, pair.right, left_inbox, right_inbox)


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
