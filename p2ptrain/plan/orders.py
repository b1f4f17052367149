"""Orders of devices worth trying where trying all of them would take too long."""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.plan.cost import CostModel


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
