"""Everybody has every part in the end, each of them told once."""

from __future__ import annotations

import pytest

from p2ptrain.tiles.gathering import Gathering


@pytest.mark.parametrize("count", range(1, 18))
def test_all_have_all_parts_after_the_rounds(count: int) -> None:
    devices = [Gathering(place, count) for place in range(count)]
    has = [{place} for place in range(count)]
    assert 2 ** devices[0].rounds >= count > 2 ** (devices[0].rounds - 1)
    for number in range(devices[0].rounds):
        told = []
        for device in devices:
            receiver, parts = device.sent(number)
            assert has[device.place].issuperset(parts)
            assert devices[receiver].received(number) == (device.place, parts)
            told.append((receiver, parts))
        for receiver, parts in told:
            assert not has[receiver].intersection(parts)
            has[receiver].update(parts)
    assert all(parts == set(range(count)) for parts in has)
