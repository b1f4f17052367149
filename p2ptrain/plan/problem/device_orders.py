"""Orders of devices worth trying where trying all of them would take too long."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from p2ptrain.plan.cost.cost_model import CostModel


def likely_orders(cost: CostModel, devices: Sequence[int]) -> list[tuple[int, ...]]:
    """A few different orders of all `devices`, most promising first.

    Largest memory first (earlier stages keep more in flight: Asteroid, section 3.4), along the
    fastest links from the holder, fastest first and fastest last.
    """
    seconds = {device: whole_seconds(cost, device) for device in devices}
    by_speed = tuple(sorted(devices, key=lambda device: seconds[device]))
    by_memory = sorted(by_speed, key=lambda device: -cost.devices[device].memory_bytes)
    orders = [tuple(by_memory), _chain(cost, by_speed), by_speed, by_speed[::-1]]
    return list(dict.fromkeys(orders))


def segment_orders(cost: CostModel, devices: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Orders whose neighbours may well share a stage, of at most `most` devices each.

    Fastest first, with the holder in front (its inputs need not travel) and where its speed puts
    it; clusters of devices with fast links to each other, the holder's first; largest memory first.
    """
    seconds = {device: whole_seconds(cost, device) for device in devices}
    by_speed = sorted(devices, key=lambda device: seconds[device])
    few = by_speed[:most]
    if cost.holder in by_speed[most:]:
        few = [*few[:-1], cost.holder]
    held_first = sorted(few, key=lambda device: device != cost.holder)
    by_memory = sorted(few, key=lambda device: -cost.devices[device].memory_bytes)
    orders = [held_first, few, _by_cluster(cost, held_first), by_memory, few[::-1]]
    return list(dict.fromkeys(tuple(order) for order in orders))


def _by_cluster(cost: CostModel, devices: Sequence[int]) -> list[int]:
    """`devices` in clusters: from the first always on to the one with the fastest way there.

    The way to a device is its best link with any already listed, both directions counted, so that
    a cluster is listed whole before a slow link is crossed; ties in the order of `devices`.
    """
    rates = cost.links.rates[np.ix_(devices, devices)]
    slower = np.minimum(rates, rates.T)
    reach, order = slower[0].copy(), [0]
    reach[0] = -np.inf
    for _ in range(len(devices) - 1):
        nearest = int(reach.argmax())
        order.append(nearest)
        reach = np.where(np.isneginf(reach), reach, np.maximum(reach, slower[nearest]))
        reach[nearest] = -np.inf
    return [devices[place] for place in order]


def whole_seconds(cost: CostModel, device: int) -> float:
    """Seconds a sample of the whole model on that device, at the largest size it was measured."""
    table = cost.devices[device].times or cost.profile.times
    largest = table.sizes[-1]
    return sum(cost.stage_seconds(device, 0, cost.unit_count, largest)) / largest


def _chain(cost: CostModel, by_speed: Sequence[int]) -> tuple[int, ...]:
    """From the holder (or the fastest) always on to the device that is reached fastest."""
    left = list(by_speed)
    chain = [cost.holder if cost.holder in left else left[0]]
    left.remove(chain[0])
    while left:
        here = chain[-1]
        nearest = max(left, key=lambda there: cost.link(here, there).bytes_per_s)
        chain.append(nearest)
        left.remove(nearest)
    return tuple(chain)
