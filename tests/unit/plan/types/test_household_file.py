from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from p2ptrain.errors import OptionError
from p2ptrain.plan.types.cluster import ClusterLink
from p2ptrain.plan.types.household_file import (
    UNLIMITED_BYTES,
    UNLIMITED_BYTES_PER_S,
    cluster_of_household,
)
from tools.testbed.household import FOLDER, Household

FILE = """
rate = "100mbit"
latency = "1ms"

[[device]]
name = "laptop"
cores = 0.5
memory = "2GiB"

[[device]]
name = "pi"
count = 2
cores = 0.25
rate = "10mbit"
latency = "5 ms"
"""


def test_devices_have_speed_memory_and_cables() -> None:
    cluster = cluster_of_household(tomllib.loads(FILE))
    assert [device.name for device in cluster.devices] == ["laptop", "pi-1", "pi-2"]
    assert [device.slowdown for device in cluster.devices] == [2.0, 4.0, 4.0]
    assert [device.memory_bytes for device in cluster.devices] == [2**31, *[UNLIMITED_BYTES] * 2]
    assert cluster.holder.name == "laptop"
    assert cluster.link("laptop", "pi-1") == ClusterLink(1.25e6, 0.005)
    assert cluster.link("pi-2", "pi-1") == ClusterLink(1.25e6, 0.005)


def test_without_a_rate_a_cable_is_fast() -> None:
    two = tomllib.loads('[[device]]\nname = "a"\ncount = 2\ncores = 1')
    fast = ClusterLink(UNLIMITED_BYTES_PER_S, 0.0)
    assert cluster_of_household(two).link("a-1", "a-2") == fast


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.toml")), ids=lambda file: file.stem)
def test_every_household_of_the_testbed_is_read_as_the_testbed_reads_it(file: Path) -> None:
    cluster = cluster_of_household(tomllib.loads(file.read_text()))
    household = Household.load(file)
    assert [d.name for d in cluster.devices] == [d.name for d in household.devices]
    for device, emulated in zip(cluster.devices, household.devices, strict=True):
        assert device.slowdown == pytest.approx(1 / emulated.cores)
        assert device.memory_bytes == (emulated.memory_bytes or UNLIMITED_BYTES)
        assert emulated.rate_mbit is not None
        others = [d.rate_mbit or 0 for d in household.devices if d.name != device.name]
        for other, rate in zip(
            [d.name for d in cluster.devices if d.name != device.name], others, strict=True
        ):
            found = cluster.link(device.name, other).bytes_per_s
            assert found == pytest.approx(min(rate, emulated.rate_mbit) * 125e3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'household: the field "device" is missing'),
        ('[[device]]\nname = "a"', 'household.device[0]: the field "cores" is missing'),
        ('[[device]]\nname = "a"\ncores = 0', "household.device[0].cores: expected at least"),
        ('[[device]]\nname = "a"\nspeed = 1', 'household.device[0]: unknown field "speed"'),
        ('rate = "fast"\n[[device]]\nname = "a"\ncores = 1', "household.rate: expected a quantity"),
        ('[[device]]\nname = "a"\ncores = 1\nrate = "0mbit"', "household.device[0].rate: must be"),
        ('[[device]]\nname = "a"\ncores = 1\nmemory = 5', "device[0].memory: expected a text"),
        ('[[device]]\nname = "a"\ncores = 1\n' * 2, 'the name "a" is given twice'),
        (
            '[[device]]\nname = "a"\ncores = 1\ncount = 600\n[[device]]\nname = "b"\ncores = 1\n'
            "count = 600",
            "household.device: at most 1000 devices",
        ),
    ],
)
def test_a_wrong_file_is_named_by_its_field(text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        cluster_of_household(tomllib.loads(text))
    assert message in str(caught.value)
