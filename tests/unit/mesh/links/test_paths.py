"""When the paths to a device are measured, and which one is taken."""

from __future__ import annotations

import pytest

from p2ptrain.mesh.links.link_probe import PathConfig
from p2ptrain.mesh.links.paths import PathSchedule, better_path, other_paths
from p2ptrain.net.link.stream import Address

LAN: Address = ("192.168.1.2", 47300)
WIFI: Address = ("192.168.2.2", 47300)
VPN: Address = ("100.64.0.2", 47300)
CONFIG = PathConfig()


@pytest.mark.parametrize(
    ("current", "rates", "taken"),
    [
        (VPN, {VPN: 1e5, LAN: 1e7}, LAN),
        (VPN, {VPN: 1e5, LAN: 1e7, WIFI: 2e7}, WIFI),
        (VPN, {LAN: 1e3}, LAN),  # the current one does not answer any more
        (LAN, {LAN: 1e7, VPN: 1e5}, None),
        (WIFI, {WIFI: 6e6, LAN: 1e7}, None),  # not worth a round
        (LAN, {LAN: 1e7}, None),
        (LAN, {}, None),
    ],
)
def test_a_path_is_taken_that_is_much_faster(
    current: Address, rates: dict[Address, float], taken: Address | None
) -> None:
    assert better_path(current, rates, CONFIG) == taken


def test_the_two_addresses_of_loopback_are_one_path() -> None:
    """A job on one machine broke off a round when a busy moment made one look slower."""
    loopback: list[Address] = [("127.0.0.1", 47300), ("::1", 47300)]
    for ip, _ in loopback:
        assert other_paths(ip, [*loopback, LAN]) == [LAN]
    assert other_paths(LAN[0], [*loopback, LAN, WIFI]) == [*loopback, WIFI]
    assert other_paths("127.0.0.2", loopback) == loopback


def test_paths_are_looked_at_soon_then_ever_more_seldom() -> None:
    schedule = PathSchedule(CONFIG)
    assert schedule.seconds_left(0.0) is None
    schedule.link_up(10.0)
    assert schedule.seconds_left(10.0) == CONFIG.first_seconds
    assert schedule.seconds_left(60.0) == 0.0
    pauses = []
    for _ in range(8):
        schedule.looked(100.0)
        pauses.append(schedule.seconds_left(100.0))
    assert pauses[:2] == [CONFIG.again_seconds, 2 * CONFIG.again_seconds]
    assert pauses[-1] == CONFIG.rarest_seconds


def test_only_new_addresses_are_worth_an_early_look() -> None:
    schedule = PathSchedule(CONFIG)
    schedule.heard([LAN], 0.0)
    schedule.looked(1.0)
    schedule.heard([LAN], 2.0)
    assert schedule.seconds_left(2.0) == CONFIG.again_seconds - 1.0
    schedule.heard([LAN, VPN], 3.0)
    assert schedule.seconds_left(3.0) == CONFIG.first_seconds
