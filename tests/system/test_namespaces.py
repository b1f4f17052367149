"""Training over real cables, of which one is pulled; slow ones are in `test_testbed_training`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.splits import SHAPES
from tests.support.thorough import examples_of
from tests.system.household import Household, losses_alone
from tests.system.split_network import split
from tools.testbed.network import Network

pytestmark = [pytest.mark.namespaces, pytest.mark.household, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).parent / "jobs" / "small.py")
CODE = "48151623"
NAMES = ("a", "b", "c")
SPLITS = ["holder", "mute"] if examples_of(1) == 1 else [*SHAPES]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(len(NAMES)) as network:
        yield network


def _household(folder: Path, network: Network) -> Household:
    prefixes = {name: network.prefix(i) for i, name in enumerate(NAMES)}
    return Household(folder, prefixes, load=False)


async def test_a_device_whose_cable_is_pulled_is_missed_by_nobody(
    network: Network, tmp_path: Path
) -> None:
    job = (SCRIPT, "-o", "epochs=1000", "--steps", "40")
    async with _household(tmp_path, network) as household:
        wanted = await losses_alone(household, *job)
        for name in ("b", "c"):
            await household.start(name, "join", "--code", CODE)
        arguments = ("--wait-for", "3", "--planner", "pp", "--code", CODE)
        holder = await household.start("a", "train", *job, *arguments)
        await holder.expect("step")
        network.pull_cable(2)
        await holder.expect("failure", name="c")
        await holder.expect("recovered")
        await holder.succeed()
        assert [e["loss"] for e in holder.events("step")] == wanted


@pytest.mark.parametrize("shape", SPLITS)
async def test_in_a_split_network_at_most_the_side_with_the_data_trains(
    shape: str, tmp_path: Path
) -> None:
    """It checks what it says; `P2PTRAIN_EXAMPLES=2` tries all shapes, on five devices."""
    names = "abc" if len(SPLITS) < len(SHAPES) else "abcde"
    found = await split(tmp_path, shape, seconds=1.0, names=names)
    assert found.away or shape == "leader"  # where the holder coordinates
    assert len(found.noticed) == (0 if shape == "ring" else len(found.away))
