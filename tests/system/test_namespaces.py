"""Devices on separate networks, as at home: an address each, and multicast that may be missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.household import Household
from tests.system.namespaces import Network

pytestmark = [pytest.mark.namespaces, pytest.mark.household, pytest.mark.timeout(150)]

SCRIPT = str(Path(__file__).parent / "jobs" / "small.py")
CODE = "48151623"
NAMES = ("a", "b", "c")


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(len(NAMES)) as network:
        yield network


def _household(folder: Path, network: Network) -> Household:
    return Household(folder, {name: network.prefix(i) for i, name in enumerate(NAMES)})


async def test_devices_find_each_other_by_multicast(network: Network, tmp_path: Path) -> None:
    async with _household(tmp_path, network) as household:
        devices = [await household.start(name, "join", "--code", CODE) for name in NAMES]
        for index, device in enumerate(devices):
            ready = await device.expect("ready")
            assert ready["address"] == network.address(index)
            for name in NAMES:
                if name != device.name:
                    await device.expect("member", name=name, state="alive")


async def test_without_multicast_a_peer_is_enough(network: Network, tmp_path: Path) -> None:
    """b and c know only a; a introduces them."""
    network.block_multicast()
    async with _household(tmp_path, network) as household:
        first = await household.start("a", "join", "--code", CODE)
        ready = await first.expect("ready")
        peer = f"{network.address(0)}:{ready['port']}"
        second = await household.start("b", "join", "--code", CODE, "--peer", peer)
        third = await household.start("c", "join", "--code", CODE, "--peer", peer)
        await second.expect("member", name="c", state="alive")
        await third.expect("member", name="b", state="alive")


async def test_without_multicast_nobody_is_found(network: Network, tmp_path: Path) -> None:
    """Shows that the test above tests what it says."""
    network.block_multicast()
    async with _household(tmp_path, network) as household:
        await (await household.start("a", "join", "--code", CODE)).expect("ready")
        arguments = ("--wait-for", "2", "--wait-timeout", "5", "--code", CODE)
        holder = await household.start("b", "train", SCRIPT, *arguments)
        assert await holder.exit_code() == 1


async def test_training_over_slow_cables_gives_the_losses_of_one_device(tmp_path: Path) -> None:
    with Network(len(NAMES), rate="100mbit") as network:
        async with _household(tmp_path, network) as household:
            reference = await household.start("a", "train", SCRIPT, "--local")
            await reference.succeed(90)
            for name in ("b", "c"):
                await household.start(name, "join", "--code", CODE)
            arguments = ("--wait-for", "3", "--planner", "pp", "--code", CODE)
            holder = await household.start("a", "train", SCRIPT, *arguments)
            await holder.succeed(90)
            assert [e["loss"] for e in holder.events("step")] == [
                e["loss"] for e in reference.events("step")
            ]


async def test_a_pulled_cable_ends_the_training_with_the_device_s_name(
    network: Network, tmp_path: Path
) -> None:
    async with _household(tmp_path, network) as household:
        for name in ("b", "c"):
            await household.start(name, "join", "--code", CODE)
        arguments = ("--wait-for", "3", "--planner", "pp", "--code", CODE, "-o", "epochs=1000")
        holder = await household.start("a", "train", SCRIPT, *arguments)
        await holder.expect("step", within_seconds=60)
        network.pull_cable(2)
        assert await holder.exit_code(within_seconds=15) == 1
        assert "c" in holder.said[-1]["message"].split()
