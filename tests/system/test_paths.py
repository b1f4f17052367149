"""Devices with a slow VPN beside their LAN: which way the bytes go, and what its end costs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.household import EXPECT_SECONDS, Household
from tools.testbed.cable import ip, run
from tools.testbed.network import Network

pytestmark = [pytest.mark.namespaces, pytest.mark.household, pytest.mark.timeout(300)]

NAMES = ("a", "b")
CODE = "16180339"
VPN_RATE = "2mbit"


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(len(NAMES)) as network:
        _add_vpn(network)
        yield network


def _add_vpn(network: Network) -> None:
    """A second interface of each device, `vpn0`, at 100.64.0.x and `VPN_RATE`."""
    switch = network.cables[0].switch
    ip("-n", switch, "link", "add", "name", "vpn", "type", "bridge", "mcast_snooping", "0")
    ip("-n", switch, "link", "set", "vpn", "up")
    for cable in network.cables:
        port = f"vpn{cable.number}"
        ends = ("type", "veth", "peer", "name", "vpn0", "netns", cable.namespace)
        ip("-n", switch, "link", "add", port, *ends)
        ip("-n", switch, "link", "set", port, "master", "vpn", "up")
        place = ("-n", cable.namespace)
        ip(*place, "address", "add", f"100.64.0.{cable.number + 1}/24", "dev", "vpn0")
        ip(*place, "link", "set", "vpn0", "up")
        slow = ("tbf", "rate", VPN_RATE, "burst", "16kb", "latency", "50ms")
        run("tc", "-n", cable.namespace, "qdisc", "add", "dev", "vpn0", "root", *slow)


async def _interface(household: Household, wanted: str) -> None:
    """Wait until the link of a to b goes over that interface: nothing announces it."""
    async with asyncio.timeout(EXPECT_SECONDS):
        while True:
            (status,) = (await household.ask("a", "status", "--json")).events
            (b,) = [member for member in status["members"] if member["name"] == "b"]
            if b.get("interface") == wanted:
                return


async def test_the_faster_path_is_taken_and_no_death_is_declared_when_one_goes(
    network: Network, tmp_path: Path
) -> None:
    for cable in network.cables:
        cable.take_address()
    prefixes = {name: network.prefix(i) for i, name in enumerate(NAMES)}
    async with Household(tmp_path, prefixes, load=False) as household:
        devices = [await household.start(name, "join", "--code", CODE) for name in NAMES]
        await devices[0].expect("member", name="b", state="alive")
        await _interface(household, "vpn0")
        for cable in network.cables:
            cable.give_address()  # the LAN comes later
        await _interface(household, "eth0")
        for cable in network.cables:
            cable.unplug()
        await _interface(household, "vpn0")
        states = [e["state"] for device in devices for e in device.events("member")]
        assert "dead" not in states
