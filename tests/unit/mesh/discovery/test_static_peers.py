"""What `--peer` names is looked up beside everything else, and again while devices are missing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from p2ptrain.errors import LinkClosed, OptionError
from p2ptrain.events import Event
from p2ptrain.mesh.config import parse_peer
from p2ptrain.mesh.discovery.roaming import StaticPeers, resolve_peer
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.net.link.stream import Address

NAS, PC = ("nas.local", 47300), ("10.0.0.7", 4000)


class _Names:
    """Who answers to which name; notes who asked, and what was answered."""

    def __init__(self) -> None:
        self.where: dict[Address, list[Address]] = {PC: [PC]}
        self.device_is_missing = True
        self.looks = 0
        self.asked = 0
        self.found: list[list[Address]] = []
        self.told: list[Event] = []
        self._changed = asyncio.Event()

    async def resolve(self, peer: Address) -> list[Address]:
        self.asked += 1
        self._changed.set()
        if peer not in self.where:
            raise LinkClosed(f"--peer {peer[0]}: no such host now")
        return self.where[peer]

    def is_needed(self) -> bool:
        self.looks += 1
        self._changed.set()
        return self.device_is_missing

    def take(self, addresses: Sequence[Address]) -> None:
        self.found.append(list(addresses))
        self._changed.set()

    async def until_found(self, addresses: list[Address]) -> None:
        await self._until(lambda: self.found[-1:] == [addresses])

    async def until_looked(self, more: int) -> None:
        wanted = self.looks + more
        await self._until(lambda: self.looks >= wanted)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def looking_up(names: _Names, *peers: Address) -> AsyncIterator[None]:
    notices = WarnOnce(names.told.append, lambda device: device)
    given = StaticPeers(peers, names.take, names.is_needed, notices, 0.001, names.resolve)
    looking = asyncio.create_task(given.run())
    yield
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking


async def test_an_unknown_name_is_looked_up_until_it_is_known() -> None:
    names = _Names()
    async with looking_up(names, NAS, PC):
        await names.until_found([PC])
        names.where[NAS] = [("10.0.0.2", 47300)]
        await names.until_found([("10.0.0.2", 47300), PC])
    assert "nas.local" in str(names.told[0])


async def test_a_name_may_lead_elsewhere_later_and_keeps_what_it_was_while_unknown() -> None:
    names = _Names()
    names.where[NAS] = [("10.0.0.2", 47300)]
    async with looking_up(names, NAS):
        await names.until_found([("10.0.0.2", 47300)])
        del names.where[NAS]
        await names.until_looked(3)
        names.where[NAS] = [("10.0.0.3", 47300)]
        await names.until_found([("10.0.0.3", 47300)])
    assert len(names.found) == 2


async def test_an_address_waits_for_no_name() -> None:
    """Where nobody answers for names, a look-up takes many seconds."""
    names = _Names()
    known = names.resolve

    async def resolve_slowly(peer: Address) -> list[Address]:
        if peer == NAS:
            await asyncio.Event().wait()
        return await known(peer)

    names.resolve = resolve_slowly  # type: ignore[method-assign]
    async with looking_up(names, NAS, PC):
        await names.until_found([PC])


async def test_nothing_is_looked_up_while_no_device_is_missing() -> None:
    names = _Names()
    names.device_is_missing = False
    async with looking_up(names, PC):
        await names.until_found([PC])  # once, for who is not paired yet
        await names.until_looked(5)
    assert names.asked == 1


async def test_a_link_local_address_keeps_its_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives it as a number beside the address."""

    async def found(*_peer: object, **_options: object) -> list[object]:
        v6, v4 = ("fe80::1", 80, 0, 3), ("10.0.0.2", 80)
        stream = socket.SOCK_STREAM
        return [
            (socket.AF_INET6, stream, 6, "", v6),
            (socket.AF_INET6, stream, 6, "", ("fd00::1", 80, 0, 0)),
            (socket.AF_INET, stream, 6, "", v4),
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    assert await resolve_peer(("nas", 80)) == [("10.0.0.2", 80), ("fe80::1%3", 80), ("fd00::1", 80)]


async def test_a_name_without_anybody_to_ask_is_no_users_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nobody(*_peer: object, **_options: object) -> list[object]:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", nobody)
    with pytest.raises(LinkClosed, match="no such host now"):
        await resolve_peer(("nas", 80))


@pytest.mark.parametrize("host", ["a" * 64, "a..b", "a\0b", "a b"])
def test_what_can_be_no_name_is_said_at_once(host: str) -> None:
    with pytest.raises(OptionError, match="--peer takes"):
        parse_peer(host)
