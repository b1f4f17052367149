"""Published configurations beside ours: names, networks, and a row that can be behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.pipedream_compare import (
    PUBLISHED,
    Row,
    equal_devices,
    networks,
    shape,
    table,
    window,
)


@pytest.mark.parametrize(
    ("replicas", "name"),
    [
        ((15, 1), "15-1"),
        ((16,), "16"),
        ((1, 1), "straight 2"),
        ((2, 2, 4), "2-2-4"),
        ((*(1,) * 12, 3, 1), "12x1-3-1"),
    ],
)
def test_shapes_read_as_in_the_paper(replicas: tuple[int, ...], name: str) -> None:
    assert shape(replicas) == name


def test_published_configurations_have_sixteen_devices_at_most() -> None:
    for published in PUBLISHED.values():
        assert all(sum(replicas) <= 16 for replicas in published.replicas)


def test_servers_of_four_are_fast_inside() -> None:
    cluster = networks(10**9)["4x4, 10 Gbit/s"]
    assert cluster.link("gpu04", "gpu07").bytes_per_s > cluster.link("gpu03", "gpu04").bytes_per_s
    assert len(equal_devices(1e9, 10**9).links) == 0


@pytest.mark.parametrize("replicas", [(15, 1), (16,), (1,) * 16, (8, 4, 4)])
def test_a_window_is_shared_evenly_and_deep_enough(replicas: tuple[int, ...]) -> None:
    count = window(replicas)
    assert count >= 32
    assert all(count % replica == 0 for replica in replicas)


def test_a_table_tells_ratios_over_the_best_published() -> None:
    row = Row("m", "n", "sync 16", {"16": None, "15-1": 50.0}, 40.0, 75.0, "8-8")
    *_, line = table([row, replace(row, auto=None)])
    assert "| - |" in line
    assert list(table([row]))[-1].endswith("8-8 | 1.50x |")
    assert "16: does not fit, 15-1: 50" in line
