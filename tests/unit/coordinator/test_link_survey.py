"""Which links are measured, in which order, and which of them twice."""

from __future__ import annotations

from itertools import combinations

import pytest

from p2ptrain.coordinator.link_survey import FRESH_SECONDS, MeasuredLinks, round_robin
from p2ptrain.plan.types.cluster import ClusterLink

MBIT = 125_000.0


def table(mbits: dict[str, float]) -> MeasuredLinks:
    """Links by sender and receiver, as "ab"."""
    links = MeasuredLinks()
    for (sender, receiver), mbit in mbits.items():
        links.record(sender, receiver, ClusterLink(mbit * MBIT, 0.001), 0.0)
    return links


def all_links(devices: str, mbit: float) -> dict[str, float]:
    return {one + other: mbit for one in devices for other in devices if one != other}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_everyone_meets_everyone_once_and_nobody_twice_in_a_round(count: int) -> None:
    devices = "abcdefgh"[:count]
    rounds = round_robin(devices)
    for pairs in rounds:
        assert len({device for pair in pairs for device in pair}) == 2 * len(pairs)
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, met)) == [list(pair) for pair in combinations(devices, 2)]


def test_what_is_old_or_was_never_measured_is_missing() -> None:
    links = table(all_links("abc", 90.0) | {"cd": 90.0})
    assert links.missing("abc", FRESH_SECONDS - 1) == []
    assert len(links.missing("abc", FRESH_SECONDS + 1)) == 3
    missing = {frozenset(pair) for pairs in links.missing("abcd", 1.0) for pair in pairs}
    assert missing == {frozenset("ad"), frozenset("bd"), frozenset("cd")}


def test_a_link_slower_than_both_ends_are_elsewhere_is_doubted() -> None:
    links = table(all_links("abcde", 92.0) | {"ad": 51.0, "bc": 85.0})
    assert [frozenset(pair) for pairs in links.doubtful("abcde") for pair in pairs] == [
        frozenset("ad")
    ]


def test_links_of_a_slow_device_are_not_doubted_though_all_others_are_faster() -> None:
    slow = {"ae": 10.0, "be": 10.0, "ce": 9.5, "ea": 10.0, "eb": 10.0, "ec": 10.0}
    assert table(all_links("abc", 92.0) | slow).doubtful("abce") == []


def test_two_devices_have_only_the_way_back_to_compare_with() -> None:
    assert table({"ab": 50.0, "ba": 92.0}).doubtful("ab") == [[("a", "b")]]
    assert table({"ab": 85.0, "ba": 92.0}).doubtful("ab") == []


def test_of_two_measurements_the_faster_counts() -> None:
    links = table({"ab": 51.0, "ba": 92.0})
    links.record_again("a", "b", ClusterLink(91 * MBIT, 0.002), 1.0)
    links.record_again("b", "a", ClusterLink(60 * MBIT, 0.002), 1.0)
    links.record_again("a", "c", ClusterLink(50 * MBIT, 0.002), 1.0)
    speeds = {pair: speed.bytes_per_s / MBIT for pair, speed in links.speeds("ab").items()}
    assert speeds == {("a", "b"): 91.0, ("b", "a"): 92.0}
    assert links.speeds("ac")["a", "c"].bytes_per_s == 50 * MBIT


def test_what_a_device_says_again_and_again_gets_old_all_the_same() -> None:
    links = table(all_links("ab", 90.0))
    for now in range(0, int(FRESH_SECONDS) + 60, 30):
        for pair in ("ab", "ba"):
            links.note(*pair, ClusterLink(90 * MBIT, 0.001), float(now))
    assert len(links.missing("ab", FRESH_SECONDS + 60)) == 1
    links.note("a", "b", ClusterLink(50 * MBIT, 0.001), FRESH_SECONDS)  # measured for somebody else
    assert links.speeds("ab")["a", "b"].bytes_per_s == 50 * MBIT
    links.note("c", "a", ClusterLink(10 * MBIT, 0.001), 5.0)
    assert links.speeds("ac")["c", "a"].bytes_per_s == 10 * MBIT
