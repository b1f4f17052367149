"""Everybody has every part in the end, each of them told once."""

from __future__ import annotations

import pytest

from p2ptrain.tiles.gathering import DIRECT, Gathering


@pytest.mark.parametrize("count", range(1, 18))
def test_all_have_all_parts_after_the_rounds(count: int) -> None:
    devices = [Gathering(place, count) for place in range(count)]
    has = [{place} for place in range(count)]
    for number in range(devices[0].rounds):
        told = []
        for device in devices:
            for receiver, parts in device.sent(number).items():
                assert has[device.place].issuperset(parts)
                assert devices[receiver].received(number)[device.place] == parts
                told.append((receiver, parts))
        assert len(told) == sum(len(device.received(number)) for device in devices)
        for receiver, parts in told:
            assert not has[receiver].intersection(parts)
            has[receiver].update(parts)
    assert all(parts == set(range(count)) for parts in has)


@pytest.mark.parametrize("count", range(2, 18))
def test_few_tell_everybody_at_once_and_many_in_rounds(count: int) -> None:
    rounds = Gathering(0, count).rounds
    if count <= DIRECT:
        assert rounds == 1
    else:
        assert 2**rounds >= count > 2 ** (rounds - 1)
