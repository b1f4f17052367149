"""What discovery hears is bounded, checked and never pushes out a trusted device."""

from __future__ import annotations

import errno
import struct

import psutil
import pytest
from zeroconf import DNSIncoming

from p2ptrain.errors import OptionError, UserError
from p2ptrain.mesh.discovery.addresses import (
    CANDIDATES_LIMIT,
    SERVICE,
    DiscoveredDevice,
    DiscoveredDevices,
    parse,
)
from p2ptrain.mesh.discovery.interfaces import InterfaceAddress, choose, machine_addresses
from p2ptrain.mesh.discovery.mdns import check_zeroconf_version

ID = "0123456789abcdef" * 4
NAME = f"{ID[:16]}.{SERVICE}"


def test_a_good_record_is_a_candidate() -> None:
    found = parse(NAME, {b"v": b"1", b"id": ID.encode()}, ["10.0.0.2"], 47300)
    assert found == DiscoveredDevice(ID, (("10.0.0.2", 47300),), 1)


@pytest.mark.parametrize(
    ("name", "properties", "ips", "port"),
    [
        (NAME, {}, ["10.0.0.2"], 47300),
        (NAME, {b"id": None}, ["10.0.0.2"], 47300),
        (NAME, {b"id": ID[:-1].encode()}, ["10.0.0.2"], 47300),
        (NAME, {b"id": b"\xff" * 64}, ["10.0.0.2"], 47300),
        (f"other.{SERVICE}", {b"id": ID.encode()}, ["10.0.0.2"], 47300),
        (f"{ID[:16]}-2.{SERVICE}", {b"id": ID.encode()}, ["10.0.0.2"], 47300),
        (NAME, {b"id": ID.encode()}, [], 47300),
        (NAME, {b"id": ID.encode()}, ["10.0.0.2"], 0),
        (NAME, {b"id": ID.encode()}, ["10.0.0.2"], None),
    ],
)
def test_bad_records_are_no_candidates(
    name: str, properties: dict[bytes, bytes | None], ips: list[str], port: int | None
) -> None:
    assert parse(name, properties, ips, port) is None


@pytest.mark.parametrize(
    "version", [b"", b"x", b"9" * 50, b"-1", "\N{ARABIC-INDIC DIGIT ONE}".encode()]
)
def test_an_unreadable_version_is_zero(version: bytes) -> None:
    found = parse(NAME, {b"v": version, b"id": ID.encode()}, ["10.0.0.2"], 1)
    assert found is not None
    assert found.version == 0


def _candidate(number: int) -> DiscoveredDevice:
    return DiscoveredDevice(f"{number:064x}", (("10.0.0.2", 1),), 1)


def test_s19_a_chain_of_pointers_in_a_packet_ends_at_once() -> None:
    """Each of 1,500 names points to the one before; the packet is nothing, and little work."""
    begin, count = 18, 1500  # after the header and the question
    chain = [0xC000 | (begin + 2 * (number - 1) if number else 0) for number in range(count)]
    last = 0xC000 | (begin + 2 * (count - 1))
    packet = struct.pack(f">6H3H{count}H", 0, 0x8400, 1, 0, 0, 0, last, 12, 1, *chain)
    heard = DNSIncoming(packet)
    assert not heard.valid
    assert heard.questions == heard.answers() == []


def test_s19_a_flood_leaves_the_trusted_and_the_newest() -> None:
    trusted = {_candidate(3).id, _candidate(20_000).id}
    table = DiscoveredDevices(trusted.__contains__)
    for number in [*range(10_000), 20_000]:
        assert table.put(_candidate(number))
    assert len(table) == CANDIDATES_LIMIT
    assert trusted <= {candidate.id for candidate in table.values()}
    assert table.get(_candidate(9_999).id) is not None
    assert table.get(_candidate(5).id) is None


def test_a_table_full_of_trusted_devices_takes_no_strangers() -> None:
    table = DiscoveredDevices(lambda device: int(device, 16) < CANDIDATES_LIMIT)
    assert all(table.put(_candidate(number)) for number in range(CANDIDATES_LIMIT))
    assert not table.put(_candidate(CANDIDATES_LIMIT))
    assert table.put(_candidate(5))


@pytest.mark.parametrize("version", ["0.149.16", "0.39.0", "0.149"])
def test_a_zeroconf_with_holes_is_refused(version: str) -> None:
    with pytest.raises(UserError, match="pip install"):
        check_zeroconf_version(version)


@pytest.mark.parametrize("version", ["0.149.17", "0.154.0", "1.0", "0.150.0rc1"])
def test_a_sound_zeroconf_is_taken(version: str) -> None:
    check_zeroconf_version(version)


LO = InterfaceAddress("lo", "127.0.0.1")
ETH = InterfaceAddress("eth0", "192.168.1.5")
DOCKER = InterfaceAddress("docker0", "172.17.0.1")


def test_real_interfaces_come_before_virtual_ones_and_loopback() -> None:
    assert choose([], [LO, ETH, DOCKER]) == [ETH.ip]
    assert choose([], [LO, DOCKER]) == [DOCKER.ip]
    assert choose([], [LO]) == [LO.ip]


def test_a_system_that_says_nothing_of_its_interfaces_has_addresses_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIOCETHTOOL is not there under gVisor, proot on phones, and emulators."""

    def refuse() -> dict[str, object]:
        raise OSError(errno.ENOSYS, "Function not implemented (ioctl(SIOCETHTOOL))")

    monkeypatch.setattr(psutil, "net_if_stats", refuse)
    assert "127.0.0.1" in [address.ip for address in machine_addresses()]


def test_interfaces_are_chosen_by_name_or_ip() -> None:
    assert choose(["lo", ETH.ip], [LO, ETH, DOCKER]) == [LO.ip, ETH.ip]
    with pytest.raises(OptionError, match="eth0"):
        choose(["wlan9"], [LO, ETH])
