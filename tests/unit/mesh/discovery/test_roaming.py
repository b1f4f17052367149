"""Discovery follows this machine's addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from p2ptrain.errors import OptionError
from p2ptrain.mesh.discovery.addresses import DiscoveredDevice
from p2ptrain.mesh.discovery.interfaces import InterfaceAddress
from p2ptrain.mesh.discovery.mdns import Discovery
from p2ptrain.mesh.discovery.roaming import LocalAddresses, RoamingDiscovery, follow_addresses

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
