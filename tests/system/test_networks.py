"""Devices with a network place each, as at home: multicast that may be missing, cables, moves."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.household import EXPECT_SECONDS, Device, Household
from tools.testbed.network import Network

pytestmark = [pytest.mark.namespaces, pytest.mark.household, pytest.mark.timeout(300)]

CODE = "48151623"
NAMES = ("a", "b", "c")
KILLED_SECONDS = 2.0
"""Whoever is only silent is suspected for longer than that."""
SILENT_SECONDS = 15.0
"""Three times the bar, on machines that test; without probes it would be minutes."""


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(len(NAMES) + 1) as network:
        yield network


def _household(folder: Path, network: Network) -> Household:
    names = (*NAMES, "copy")
    prefixes = {name: network.prefix(i) for i, name in enumerate(names)}
    return Household(folder, prefixes, load=False)


async def _all_alive(*devices: Device) -> None:
    for device in devices:
        for other in devices:
            if other is not device:
                await device.expect("member", name=other.name, state="alive")


async def _all_say(
    device: str,
    state: str,
    witnesses: list[tuple[Device, int]],
    seconds: float = EXPECT_SECONDS,
) -> None:
    """All of `witnesses`, each with how much it had said before, say so within `seconds`."""
    async with asyncio.TaskGroup() as group:
        for witness, since in witnesses:
            group.create_task(witness.expect("member", seconds, since, name=device, state=state))


async def test_multicast_finds_devices_also_one_that_gets_its_address_late(
    network: Network, tmp_path: Path
) -> None:
    network.take_address(2)
    async with _household(tmp_path, network) as household:
        devices = [await household.start(name, "join", "--code", CODE) for name in NAMES]
        for index, device in enumerate(devices[:2]):
            assert (await device.expect("ready"))["address"] == network.address(index)
        late = devices[2]
        assert "No network" in (await late.expect("warning"))["message"]
        await _all_alive(*devices[:2])
        await late.expect("ready")
        assert late.events("member") == []
        network.give_address(2)
        await _all_alive(*devices)


async def test_a_household_with_ipv6_alone_finds_its_devices(tmp_path: Path) -> None:
    """a and b have link-local IPv6 addresses and nothing else; c has both kinds."""
    with Network(len(NAMES) + 1, ipv6=True) as network:
        network.take_address(0)
        network.take_address(1)
        async with _household(tmp_path, network) as household:
            devices = [await household.start(name, "join", "--code", CODE) for name in NAMES]
            assert (await devices[0].expect("ready"))["address"].startswith("fe80::")
            await _all_alive(*devices)


async def test_without_multicast_one_peer_is_enough(network: Network, tmp_path: Path) -> None:
    """b and c know only a; a introduces them. Without that nobody is found."""
    network.block_multicast()
    async with _household(tmp_path, network) as household:
        first = await household.start("a", "join", "--code", CODE)
        alone = await household.start("copy", "join", "--code", CODE)
        peer = network.address(0)  # the port is the usual one
        second = await household.start("b", "join", "--code", CODE, "--peer", peer)
        third = await household.start("c", "join", "--code", CODE, "--peer", f"{peer}:47300")
        await _all_alive(first, second, third)
        await alone.expect("pairing")
        assert alone.events("member") == []


async def test_every_kind_of_loss_is_seen_in_time(network: Network, tmp_path: Path) -> None:
    async with _household(tmp_path, network) as household:
        devices = [await household.start(name, "join", "--code", CODE) for name in NAMES]
        first, second, third = devices
        await _all_alive(*devices)

        def now(*witnesses: Device) -> list[tuple[Device, int]]:
            return [(witness, len(witness.said)) for witness in witnesses]

        being_written = shutil.ignore_patterns("*.tmp")
        shutil.copytree(household.state_dir("c"), household.state_dir("copy"), ignore=being_written)
        copy = await household.start("copy", "join", call="c")
        assert await copy.exit_code() == 1
        assert "another running device uses the identity" in copy.said[-1]["message"]

        witnesses = now(first, second)
        await third.kill()
        await _all_say("c", "dead", witnesses, KILLED_SECONDS)
        witnesses = now(first, second)
        third = await household.start("c", "join")
        await third.expect("ready")
        await _all_say("c", "alive", witnesses)

        witnesses = now(first, third)
        second.freeze()
        await _all_say("b", "dead", witnesses, SILENT_SECONDS)
        witnesses = now(first, third)
        second.thaw()
        await _all_say("b", "alive", witnesses)

        witnesses = now(first, second)
        network.pull_cable(2)
        await _all_say("c", "dead", witnesses, SILENT_SECONDS)
        network.plug_cable(2)
        for name in NAMES:
            status = await household.ask(name, "status")
            assert status.exit_code == 0
        await _all_say("c", "alive", witnesses)
        assert all(device.stderr == "" for device in (first, second, third))
