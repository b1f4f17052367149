"""Households as TOML: what they say, and which field is wrong where one is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.testbed.errors import HouseholdError
from tools.testbed.household import DeviceDescription, Household, names
from tools.testbed.placement import places

GIB = 2**30


def test_devices_take_the_household_s_defaults_and_say_otherwise_themselves() -> None:
    household = Household.parse(
        "home",
        """
        rate = "100mbit"
        [[device]]
        name = "laptop"
        cores = 1
        memory = "2GiB"
        [[device]]
        name = "pi"
        count = 2
        cores = 0.25
        rate = "10mbit"
        """,
    )
    assert household.devices == (
        DeviceDescription("laptop", 1.0, 2 * GIB, 100.0),
        DeviceDescription("pi-1", 0.25, None, 10.0),
        DeviceDescription("pi-2", 0.25, None, 10.0),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "1 to 64 devices"),
        ("device = 1", "device: begin each"),
        ("[[device]", "no TOML"),
        ('speed = "fast"', "speed: no such field"),
        ("[[device]]\ncores = 0.5", "device 1: name: text in quotes"),
        ('[[device]]\nname = "a b"\ncores = 0.5', "device 1: name: 'a b'"),
        ('[[device]]\nname = "pi"', "device 1: cores: .* not nothing"),
        ('[[device]]\nname = "pi"\ncores = true', "device 1: cores: "),
        ('[[device]]\nname = "pi"\ncores = 1.5', "device 1: cores: 1.5"),
        ('[[device]]\nname = "pi"\ncores = nan', "device 1: cores: nan"),
        ('[[device]]\nname = "pi"\ncores = 0', "device 1: cores: 0"),
        ('[[device]]\nname = "pi"\ncores = 1\ncount = 0', "device 1: count: 1 to 64"),
        ('[[device]]\nname = "pi"\ncores = 1\ncount = true', "device 1: count: "),
        ('[[device]]\nname = "pi"\ncores = 1\nrate = 100', "device 1: rate: text in quotes"),
        ('[[device]]\nname = "pi"\ncores = 1\nrate = "100"', "device 1: rate: '100'"),
        ('[[device]]\nname = "pi"\ncores = 1\nrate = "0mbit"', "device 1: rate: .*above zero"),
        ('[[device]]\nname = "pi"\ncores = 1\nrate = "0.1kbit"', "device 1: rate: 0.0001mbit is"),
        ('[[device]]\nname = "pi"\ncores = 1\nrate = "1000gbit"', "device 1: rate: 1e.06mbit is"),
        (f'[[device]]\nname = "pi"\ncores = 1\nrate = "{10**400}gbit"', "rate: .* is too large"),
        (f'[[device]]\nname = "pi"\ncores = 1\nmemory = "{10**400}"', "memory: .* is too large"),
        ('[[device]]\nname = "pi"\ncores = 1\nmemory = "2 apples"', "device 1: memory: "),
        ('[[device]]\nname = "pi"\ncores = 1\ncolour = "red"', "device 1: colour: "),
        ('[[device]]\nname = "pi"\ncores = 0.1\n' * 2, "several devices are called pi"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(HouseholdError, match=words):
        Household.parse("home", text)


def test_a_file_of_one_s_own_is_named_in_its_errors(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[[device]]\nname = "pi"\ncores = 0.3')
    assert Household.load(file).name == "mine"
    file.write_text("cores = 1")
    with pytest.raises(HouseholdError, match=r"mine\.toml: cores: no such field"):
        Household.load(file)


def test_an_unknown_household_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(HouseholdError, match="there are A, B, B1000, C, D, F, P1"):
        Household.load("Z")


SHARES = {
    "A": [0.30] * 5,
    "B": [0.40] * 3 + [0.195] * 2,
    "B1000": [0.40] * 3 + [0.195] * 2,
    "C": [0.60] + [0.295] * 2 + [0.18] * 3,
    "D": [0.50] + [0.31] * 3,
    "F": [0.80] * 2 + [0.08],
    **{f"P{count}": [0.28] * count for count in range(1, 7)},
}


@pytest.mark.parametrize("name", names())
def test_every_household_fits_on_two_cpus_with_a_tenth_to_spare(name: str) -> None:
    shares = [device.cores for device in Household.load(name).devices]
    assert shares == SHARES[name]
    chosen = places(shares, [0, 1])
    for cpu in (0, 1):
        used = sum(share for share, own in zip(shares, chosen, strict=True) if own == cpu)
        assert used <= 0.9


def test_only_one_household_has_faster_cables() -> None:
    rates = {n: {device.rate_mbit for device in Household.load(n).devices} for n in names()}
    assert rates.pop("B1000") == {1000.0}
    assert set(map(tuple, rates.values())) == {(100.0,)}


def test_a_household_can_have_other_cables() -> None:
    own = Household.load("F")
    other = own.at_rate("1gbit")
    assert {device.rate_mbit for device in other.devices} == {1000.0}
    assert other.at_rate("100mbit") == own
    with pytest.raises(HouseholdError, match="rate: 'fast' is not a rate"):
        own.at_rate("fast")
