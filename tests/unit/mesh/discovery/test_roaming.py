"""Discovery follows this machine's addresses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from p2ptrain.errors import LinkClosed, OptionError
from p2ptrain.events import Event
from p2ptrain.mesh.config import parse_peer
from p2ptrain.mesh.discovery.addresses import DiscoveredDevice
from p2ptrain.mesh.discovery.interfaces import InterfaceAddress
from p2ptrain.mesh.discovery.mdns import Discovery
from p2ptrain.mesh.discovery.roaming import (
    LocalAddresses,
    RoamingDiscovery,
    StaticPeers,
    follow_addresses,
    resolve_peer,
)
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.net.link.stream import Address

HOME = InterfaceAddress("wlan0", "192.168.1.5")
OFFICE = InterfaceAddress("wlan0", "10.0.0.5")
LOOPBACK = InterfaceAddress("lo", "127.0.0.1")
IPV6 = InterfaceAddress("wlan0", "fd00::5")
LINK_LOCAL = InterfaceAddress("wlan0", "fe80::5%wlan0")
OTHER_IPV6 = (InterfaceAddress("lo", "::1"), InterfaceAddress("docker0", "fd01::1"))


class _Machine:
    """Has the addresses that a test gives it, and notes which discoveries run."""

    def __init__(self, *addresses: InterfaceAddress) -> None:
        self.addresses = list(addresses)
        self.running: list[tuple[str, ...]] = []
        self.warnings: list[str] = []
        self.broken = False
        self.changed = asyncio.Event()

    def make(self, ips: Sequence[str]) -> Discovery:
        return _FakeDiscovery(self, tuple(ips))

    def roaming(self, *wanted: str) -> RoamingDiscovery:
        own = LocalAddresses(wanted, lambda: self.addresses)
        return RoamingDiscovery(own, self.make, self.warnings.append, look_seconds=0.001)

    async def until(self, running: list[tuple[str, ...]]) -> None:
        async with asyncio.timeout(5):
            while self.running != running:
                await self.changed.wait()
                self.changed.clear()


class _FakeDiscovery:
    def __init__(self, machine: _Machine, ips: tuple[str, ...]) -> None:
        self._machine = machine
        self._ips = ips

    async def start(
        self, device_id: str, port: int, on_found: Callable[[DiscoveredDevice], None]
    ) -> None:
        if self._machine.broken:
            raise OSError(19, "No such device")
        self._machine.running.append(self._ips)
        self._machine.changed.set()

    async def close(self) -> None:
        if self._ips in self._machine.running:
            self._machine.running.remove(self._ips)
            self._machine.changed.set()


async def test_it_restarts_on_another_network() -> None:
    machine = _Machine(HOME, LOOPBACK)
    roaming = machine.roaming()
    await roaming.start("id", 1, lambda _found: None)
    assert machine.running == [(HOME.ip,)]
    machine.addresses = [OFFICE, LOOPBACK]
    await machine.until([(OFFICE.ip,)])
    await roaming.close()
    assert machine.running == []
    assert machine.warnings == []


async def test_without_a_network_it_waits_for_one() -> None:
    machine = _Machine()
    roaming = machine.roaming()
    await roaming.start("id", 1, lambda _found: None)
    assert machine.running == []
    machine.addresses = [HOME]
    await machine.until([(HOME.ip,)])
    await roaming.close()
    assert len(machine.warnings) == 1


async def test_a_network_without_multicast_is_said_and_survived() -> None:
    machine = _Machine(HOME)
    machine.broken = True
    roaming = machine.roaming()
    await roaming.start("id", 1, lambda _found: None)
    assert "give --peer HOST" in machine.warnings[0]
    machine.broken = False
    machine.addresses = [OFFICE]
    await machine.until([(OFFICE.ip,)])
    await roaming.close()


async def test_only_this_machine_is_said() -> None:
    machine = _Machine(LOOPBACK)
    roaming = machine.roaming()
    await roaming.start("id", 1, lambda _found: None)
    await roaming.close()
    assert "only programs on this device" in machine.warnings[0]


@pytest.mark.parametrize(
    ("ipv4", "ipv6", "published", "shown"),
    [
        ([LOOPBACK], [IPV6, LINK_LOCAL], [IPV6.ip], IPV6.ip),
        ([LOOPBACK, HOME], [IPV6], [HOME.ip], HOME.ip),
        ([LOOPBACK], [LINK_LOCAL], [], LINK_LOCAL.ip),  # its scope means nothing to others
        ([LOOPBACK], [], ["fd01::1"], "fd01::1"),  # a virtual machine's network, as by IPv4
        ([], [IPV6], [IPV6.ip], IPV6.ip),
    ],
)
def test_a_hello_names_addresses_that_others_can_dial(
    ipv4: list[InterfaceAddress], ipv6: list[InterfaceAddress], published: list[str], shown: str
) -> None:
    own = LocalAddresses((), lambda: [*ipv4, *OTHER_IPV6, *ipv6])
    assert own.published == published
    assert own.shown == shown


def test_without_any_network_only_loopback_is_named() -> None:
    assert LocalAddresses((), lambda: [LOOPBACK, OTHER_IPV6[0]]).published == [LOOPBACK.ip]


def test_an_interface_is_used_with_all_its_addresses() -> None:
    own = LocalAddresses(["wlan0"], lambda: [HOME, LOOPBACK, IPV6, LINK_LOCAL])
    assert own.ips == [HOME.ip, IPV6.ip, LINK_LOCAL.ip]
    assert LocalAddresses(["fe80::5"], lambda: [HOME, LINK_LOCAL]).ips == [LINK_LOCAL.ip]


def test_a_wanted_interface_may_come_and_go_but_must_be_there_at_first() -> None:
    addresses = [HOME, LOOPBACK]
    own = LocalAddresses(["wlan0"], lambda: addresses)
    assert (own.ips, own.shown) == ([HOME.ip], HOME.ip)
    addresses.remove(HOME)
    assert own.refresh()
    assert (own.ips, own.shown) == ([], "127.0.0.1")
    assert not own.refresh()
    with pytest.raises(OptionError, match="wlan0"):
        LocalAddresses(["wlan0"], lambda: addresses)


def test_of_two_wanted_interfaces_one_may_be_down() -> None:
    addresses = [HOME, InterfaceAddress("eth0", "10.1.0.2"), LOOPBACK]
    own = LocalAddresses(["wlan0", "eth0", HOME.ip], lambda: addresses)
    assert own.ips == [HOME.ip, "10.1.0.2"]
    del addresses[1]
    assert own.refresh()
    assert own.ips == [HOME.ip]


async def test_discovery_restarts_where_another_part_saw_the_change_first() -> None:
    machine = _Machine(HOME)
    own = LocalAddresses((), lambda: machine.addresses)
    roaming = RoamingDiscovery(own, machine.make, machine.warnings.append, look_seconds=0.001)
    await roaming.start("id", 1, lambda _found: None)
    machine.addresses = [OFFICE]
    assert own.refresh()
    await machine.until([(OFFICE.ip,)])
    await roaming.close()


async def test_listening_follows_the_interface_and_waits_where_it_is_gone() -> None:
    machine = _Machine(HOME, LOOPBACK)
    own = LocalAddresses(["wlan0"], lambda: machine.addresses)
    moves: list[list[str]] = []
    looks = asyncio.Semaphore(0)

    def move(hosts: Sequence[str]) -> None:
        moves.append(list(hosts))
        looks.release()
        if len(moves) > 1:
            raise OptionError("port 4000 of this device is taken")

    following = asyncio.create_task(follow_addresses(own, move, machine.warnings.append, 0.001))
    async with asyncio.timeout(5):
        await looks.acquire()
        machine.addresses = [LOOPBACK]
        own.refresh()
        machine.addresses = [OFFICE, LOOPBACK]
        await looks.acquire()
        await looks.acquire()  # it tries again
    following.cancel()
    assert moves[:1] + moves[-1:] == [[HOME.ip], [OFFICE.ip]]
    assert all("other devices cannot connect there" in text for text in machine.warnings)


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
