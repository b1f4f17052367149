"""Who announces our id is dialled, however often it is announced, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from p2ptrain.aio.tasks import TaskScope
from p2ptrain.errors import LinkClosed, ProtocolError
from p2ptrain.mesh.discovery.addresses import DiscoveredDevice
from p2ptrain.mesh.identity_conflicts import PAUSE_SECONDS, IdentityClash
from p2ptrain.mesh.links.hello import Hello, LinkRefusal, refused
from p2ptrain.net.link.stream import Address
from p2ptrain.net.message import Message

ID = "ab" * 32
OWN = ("10.0.0.1", 4000)


class _Network:
    """Notes dials and pauses; each lasts until it is let go."""

    def __init__(self) -> None:
        self.dials: list[Sequence[Address]] = []
        self.pauses: list[float] = []
        self.liars: list[str] = []
        self.side_by_side = 0
        self._begun: asyncio.Queue[None] = asyncio.Queue()
        self._go: asyncio.Queue[None] = asyncio.Queue()

    async def dial(self, device_id: str, addresses: Sequence[Address]) -> None:
        assert device_id == ID
        self.dials.append(addresses)
        await self._stay()
        raise LinkClosed("nobody is there")

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await self._stay()

    async def begun(self) -> None:
        """Wait for the next dial or pause."""
        await asyncio.wait_for(self._begun.get(), 5.0)

    def let_go(self) -> None:
        """End it."""
        self._go.put_nowait(None)

    async def _stay(self) -> None:
        self.side_by_side += 1
        assert self.side_by_side == 1
        self._begun.put_nowait(None)
        await self._go.get()
        self.side_by_side -= 1


def _copies(network: Any, scope: TaskScope) -> IdentityClash:
    return IdentityClash(ID, network, scope, network.liars.append, network.sleep)


def _announced(number: int) -> DiscoveredDevice:
    return DiscoveredDevice(ID, (OWN, (f"10.1.{number // 250}.{number % 250}", 1)), 3)


async def test_a_flood_of_our_own_id_is_one_dial_at_a_time_with_a_pause() -> None:
    network = _Network()
    async with TaskScope() as scope:
        copies = _copies(network, scope)
        for number in range(1000):
            copies.heard(_announced(number), [OWN[0]], OWN[1])
        await network.begun()
        network.let_go()
        await network.begun()
        for number in range(5000):
            copies.heard(_announced(number), [OWN[0]], OWN[1])
        assert (len(network.dials), network.pauses) == (1, [PAUSE_SECONDS])
        network.let_go()
        await network.begun()
        assert network.dials[1:] == [[_announced(4999).addresses[1]]]


async def test_after_silence_a_copy_is_dialled_at_once() -> None:
    network = _Network()
    async with TaskScope() as scope:
        copies = _copies(network, scope)
        for number in range(2):
            copies.heard(_announced(number), [OWN[0]], OWN[1])
            await network.begun()
            assert len(network.dials) == number + 1
            network.let_go()
            await network.begun()  # the pause
            network.let_go()
            assert copies.dialling is not None
            await copies.dialling


async def test_our_own_announcement_is_no_other_device() -> None:
    network = _Network()
    async with TaskScope() as scope:
        copies = _copies(network, scope)
        copies.heard(DiscoveredDevice(ID, (OWN,), 3), [OWN[0]], OWN[1])
        await asyncio.sleep(0)  # a dial would begin
    assert network.dials == []


async def test_a_members_word_of_a_copy_is_looked_into_and_ends_nothing() -> None:
    network = _Network()
    async with TaskScope() as scope:
        copies = _copies(network, scope)
        older = Hello("anna", "other", 9.0, 4000, ("10.0.0.9", "no address", "0.0.0.0"))
        await copies.refused("bert", refused(LinkRefusal.COPIED, older))
        await network.begun()
        assert network.dials == [(("10.0.0.9", 4000),)]
        network.let_go()
        await network.begun()  # nobody with our certificate was there
        assert network.liars == ["bert"]


@pytest.mark.parametrize("elsewhere", [[], [["x" * 99, 1]], [["0.0.0.0", 4000]]])
async def test_a_word_without_an_address_is_a_lie(elsewhere: object) -> None:
    network = _Network()
    async with TaskScope() as scope:
        message = Message("mesh.refused", {"reason": "copied", "elsewhere": elsewhere})
        await _copies(network, scope).refused("bert", message)
    assert (network.dials, network.liars) == ([], ["bert"])


@pytest.mark.parametrize("elsewhere", [None, 7, [[]], [["10.0.0.1", "x"]]])
async def test_a_malformed_word_is_refused(elsewhere: object) -> None:
    network = _Network()
    async with TaskScope() as scope:
        message = Message("mesh.refused", {"reason": "copied", "elsewhere": elsewhere})
        with pytest.raises(ProtocolError):
            await _copies(network, scope).refused("bert", message)
    assert network.dials == []
